"""Which version of the collection this is, by its own sources: what every machine of a group should have alike."""

import hashlib

from aura import compilation

SUFFIXES = (".py", ".cpp", ".h", ".inl", ".cu", ".cuh")


def source_files(root=compilation.ROOT):
    """{path below root: hash} of the collection's own sources, an end of line counted as one character everywhere."""
    checkout = root.glob("*.py") if (root / "setup.py").exists() else []  # otherwise those of other packages
    paths = [*checkout, *(path for folder in ("aura", "csrc") for path in (root / folder).rglob("*"))]
    return {path.relative_to(root).as_posix(): _hash(path.read_bytes().replace(b"\r\n", b"\n"))
            for path in sorted(paths) if path.suffix in SUFFIXES and path.is_file()
            and not any(part.startswith(".") for part in path.relative_to(root).parts)}  # editors' locks and copies


def fingerprint():
    """A hash of all of source_files()."""
    return _hash(repr(source_files()).encode())


def _hash(content):
    return hashlib.sha256(content).hexdigest()[:16]
