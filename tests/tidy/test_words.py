"""What no file of the project says: where it was made, by whom, or from which registry."""

import re
import tomllib

from tests.tidy.sources import ROOT, expect_none, name_of, own_files, text_of

# The places that an address in the project may name. A package registry is not among them: which
# one to use is the reader's configuration, never ours.
KNOWN_HOSTS = {
    "localhost",
    "127.0.0.1",
    "0.0.0.0",
    "[::1]",
    "example.com",
    "example.org",
    "github.com",
    "www.apache.org",
    "www.w3.org",
    "arxiv.org",
    "opentelemetry.io",
    "json.schemastore.org",
    "docs.docker.com",
    "kubernetes.io",
    "spiffe",
    "cli",
}
ADDRESS = re.compile(r"https?://(\[::1\]|[\w.-]*\w)", re.ASCII)
# Put together here, so that this file does not say them either.
REGISTRY_WORDS = re.compile(
    "|".join(
        re.escape(head + tail)
        for head, tail in [
            ("pypi", ".org"),
            ("pythonhosted", ".org"),
            ("npmjs", ".org"),
            ("npmjs", ".com"),
            ("download.", "pytorch.org"),
            ("crates", ".io"),
            ("repo1.", "maven"),
            ("proxy.", "golang.org"),
            ("buf", ".build/gen"),
        ]
    )
)
MACHINE_PATH = re.compile(r"(?<![\w./$}])/(work|root|home|Users|opt|mnt)/\w")
UNFINISHED = re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "XX" + "X"]) + r")\b")
TRACKER = re.compile(r"\bissue\s*#?\s*\d|\bissue #|(?<!\w)#\d{2,}\b|\bPR #?\d", re.IGNORECASE)


def _found(pattern: re.Pattern[str]) -> list[str]:
    return [
        f"{name_of(path)}:{number}: {line.strip()[:80]}"
        for path in own_files()
        if path.name != "package-lock.json"
        for number, line in enumerate((text_of(path) or "").splitlines(), 1)
        if pattern.search(line)
    ]


def test_no_path_of_one_machine() -> None:
    expect_none(_found(MACHINE_PATH))


def test_no_registry() -> None:
    expect_none(_found(REGISTRY_WORDS))


def test_addresses_name_known_hosts() -> None:
    strangers = [
        f"{name_of(path)}: {host}"
        for path in own_files()
        if path.name != "package-lock.json"
        for host in ADDRESS.findall(text_of(path) or "")
        if host not in KNOWN_HOSTS and not host.endswith((".test", ".invalid", ".example"))
    ]
    expect_none(strangers)


def test_nothing_is_left_for_later() -> None:
    expect_none(_found(UNFINISHED))


def test_no_tracker_numbers() -> None:
    """Code says why in words that still hold when the tracker is gone."""
    expect_none(_found(TRACKER))


def test_lock_file_names_no_host() -> None:
    lock = ROOT / "clients/typescript/package-lock.json"
    text = lock.read_text()
    assert '"resolved"' not in text
    assert "omit-lockfile-registry-resolved=true" in (lock.parent / ".npmrc").read_text()
    hosts = set(ADDRESS.findall(text))
    assert hosts <= {"github.com", "opencollective.com"}, "only the authors' funding pages"


def test_pyproject_names_no_index() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert not {"uv", "poetry", "pdm"} & set(settings["tool"])
