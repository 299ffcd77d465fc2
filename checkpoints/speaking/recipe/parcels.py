"""Folders and files in pieces that a machine's way back can carry: at most 8 of at most 15 MiB.

    python -m checkpoints.speaking.recipe.parcels pack OUT FILE [FILE ...]
    python -m checkpoints.speaking.recipe.parcels unpack PARCELS FOLDER

An uncompressed tar, cut; `manifest.json` holds every piece's SHA-256, and `unpack` believes nothing else.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

LARGEST_PIECE = 15 * 2**20
MOST_PIECES = 7  # and the manifest
LARGEST_TOTAL = 60 * 2**20


def pack(out: Path, files: Sequence[Path]) -> int:
    """Write the pieces; the bytes in all. Raises ValueError when they are too many."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for file in files:
            archive.add(file, file.name)
    data = buffer.getvalue()
    pieces = [data[i : i + LARGEST_PIECE] for i in range(0, len(data), LARGEST_PIECE)]
    if len(pieces) > MOST_PIECES or len(data) > LARGEST_TOTAL:
        raise ValueError(
            f"{len(data):,} bytes in {len(pieces)} pieces: at most {LARGEST_TOTAL:,} in {MOST_PIECES} come back"
        )
    out.mkdir(parents=True, exist_ok=True)
    sums = {}
    for i, piece in enumerate(pieces):
        name = f"parcel-{i}.bin"
        (out / name).write_bytes(piece)
        sums[name] = hashlib.sha256(piece).hexdigest()
    (out / "manifest.json").write_text(json.dumps(sums, indent=1), encoding="utf-8")
    return len(data)


def unpack(parcels: Path, folder: Path) -> list[str]:
    """Join and extract; the names. Raises ValueError for a piece that isn't what was packed."""
    sums: dict[str, str] = json.loads((parcels / "manifest.json").read_text(encoding="utf-8"))
    data = b""
    for name, digest in sums.items():
        piece = (parcels / name).read_bytes()
        if hashlib.sha256(piece).hexdigest() != digest:
            raise ValueError(f"{name} isn't what was packed")
        data += piece
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        archive.extractall(folder, filter="data")
        return archive.getnames()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="recipe.parcels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    packing = verbs.add_parser("pack")
    packing.add_argument("out", type=Path)
    packing.add_argument("files", type=Path, nargs="+")
    unpacking = verbs.add_parser("unpack")
    unpacking.add_argument("parcels", type=Path)
    unpacking.add_argument("folder", type=Path)
    arguments = parser.parse_args(argv)
    try:
        if arguments.verb == "pack":
            print(f"==> {pack(arguments.out, arguments.files):,} bytes in {arguments.out}")
        else:
            print(f"==> {', '.join(unpack(arguments.parcels, arguments.folder))}")
    except (OSError, ValueError) as error:
        print(f"==> {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
