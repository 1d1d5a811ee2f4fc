"""What a chaos run must not find, beyond what every history is held against."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from callforest.capture.v1 import call_record_pb2
from callforest_client.ledger import Manifest
from tests.robustness.history import Faults


@dataclass(slots=True)
class Verdict:
    """What is wrong, by kind.

    Attributes:
        faults: lost, duplicated or changed.
        wrong_parents: calls that do not continue the call before them.
        resampled: logical calls that were sampled again after their tokens were staged.
    """

    faults: Faults = field(default_factory=Faults)
    wrong_parents: list[str] = field(default_factory=list)
    resampled: list[str] = field(default_factory=list)

    def all(self) -> list[str]:
        """Give every fault, its kind first."""
        return [
            *self.faults.all(),
            *(f"wrong parent: {fault}" for fault in self.wrong_parents),
            *(f"resampled: {fault}" for fault in self.resampled),
        ]


def check_parents(
    orders: Mapping[str, Sequence[str]], manifests: Mapping[str, Manifest]
) -> list[str]:
    """Hold each call that a harness got against the ledger: it continues the one before it (P3).

    Args:
        orders: of each attempt, the calls in the order in which its one harness got them; each
            request held all answers before.
        manifests: what the ledger has, by attempt.
    """
    wrong = []
    for capture_key, order in orders.items():
        manifest = manifests.get(capture_key)
        records = {} if manifest is None else {one.coords.call_id: one for one in manifest.records}
        before = ""
        for call_id in order:
            record = records.get(call_id)
            if record is not None and record.coords.parent_call_id != before:
                named = record.coords.parent_call_id or "nothing"
                wrong.append(
                    f"{capture_key}/{call_id} continues {named}, not {before or 'nothing'}"
                )
            before = call_id
    return wrong


def check_records(manifests: Mapping[str, Manifest]) -> Faults:
    """Find requests that have two records: in a run every context is asked for once."""
    faults = Faults()
    for capture_key, manifest in manifests.items():
        seen = Counter(_asked(record) for record in manifest.records)
        faults.duplicated += [
            f"a request of {capture_key}, {n} times" for n in seen.values() if n > 1
        ]
    return faults


def check_samples(lines: Iterable[str]) -> list[str]:
    """Find calls that an engine began to sample though their tokens were durable.

    Staging is asked before a call is sampled again. It may say that it has nothing, and get the
    tokens that a dying worker sent a moment later: then two samples race, and the first that is
    staged is the call. Nobody could know, so such a sample is no fault. Each look excuses one.

    Args:
        lines: the calls' diary: `staged`, `missing` or `sampled`, the call, and when, on one clock.
    """
    staged: set[str] = set()
    looked: set[str] = set()
    resampled = []
    events = [(float(moment), deed, call_id) for deed, call_id, moment in map(str.split, lines)]
    for _, deed, call_id in sorted(events):
        if deed == "staged":
            staged.add(call_id)
        elif deed == "missing" and call_id not in staged:
            looked.add(call_id)
        elif deed == "sampled":
            if call_id in staged and call_id not in looked:
                resampled.append(call_id)
            looked.discard(call_id)
    return resampled


def _asked(record: call_record_pb2.CallRecord) -> tuple[str, int, bytes]:
    """Name the request that a record answers: what it continues, and its context."""
    prints = record.fingerprints
    return record.coords.parent_call_id, prints.context_item_count, prints.context_digest
