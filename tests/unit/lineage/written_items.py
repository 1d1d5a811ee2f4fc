"""Items as dialects write them, and their atoms as they are read."""

from callforest_core.lineage.atom import AtomKind, fields_of
from callforest_core.lineage.atoms import atoms_of

Sent = dict[str, object]


def read(*items: object) -> list[tuple[AtomKind, list[str]]]:
    return [fields_of(atom) for atom in atoms_of(items)]


def call(arguments: object = "{}", **entry: object) -> Sent:
    function = {"name": "run", "arguments": arguments}
    return {"id": "c1", "type": "function", "function": function, **entry}


def answer(**fields: object) -> Sent:
    return {"role": "assistant", **fields}
