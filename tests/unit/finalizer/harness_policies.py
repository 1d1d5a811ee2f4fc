"""Selection policies as a harness would bring them."""

from __future__ import annotations

from callforest_core.custody.call import CallRecord

NOT_A_FUNCTION = 7


def last_root(records: list[CallRecord], result: dict[str, object]) -> object:
    """Selects what the result names; the last of it is scored. Ruins what it was given."""
    wanted = result["keep"]
    assert isinstance(wanted, list)
    kept = [one for name in wanted for one in records if one.call_id == name]
    records.clear()
    result.clear()
    return kept, kept[-1].response_id


def everything(records: list[CallRecord], result: object) -> object:
    """Selects what it is given as it is given; the last of it is scored."""
    return records, records[-1].response_id


def alters(records: list[CallRecord], result: object) -> object:
    object.__setattr__(records[0], "parent_call_id", "elsewhere")
    return records[:1], records[0].response_id


def raises(records: list[CallRecord], result: object) -> object:
    raise RuntimeError("the secret of the harness")


def gives_up(records: list[CallRecord], result: object) -> object:
    raise SystemExit(3)


def gives_one(records: list[CallRecord], result: object) -> object:
    return records


async def waits(records: list[CallRecord], result: object) -> object:
    return records, None


def hides_a_coroutine(records: list[CallRecord], result: object) -> object:
    return waits(records, result)


def takes_one(records: list[CallRecord]) -> object:
    return records, None
