"""Write `docs/requirements.md` from the markers of the tests."""

from tools.requirement_table import TABLE, table

if __name__ == "__main__":
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text(table(), "utf-8")
