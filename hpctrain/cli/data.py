"""Verb ``hpctrain data``: packs a corpus into a token file, and shows the content of a data file."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from hpctrain.cli.main import add_action, add_verb
from hpctrain.data.corpus import KINDS
from hpctrain.errors import DataError
from hpctrain.util.text import printable, printable_lines

_EPILOG = """\
examples:
  hpctrain data pack ~/books -o books.h5    every text file below a folder, as byte tokens
  hpctrain data pack ~/photos -o photos.h5  every image below a folder, of different sizes, with their classes
  hpctrain data show books.h5               shapes, element types, and a check of the checksums

Files of images or vectors of one size (data.format = "arrays") are plain HDF5: docs/data-files.md shows how to write
one, and docs/data-sets.md how samples of different sizes are read.
"""
_PACK_EPILOG = """\
examples:
  hpctrain data pack -o data/stdlib.h5                   the Python standard library's own source
  hpctrain data pack ~/notes book.txt -o data/mine.h5    every text file below a folder, and one more file
  hpctrain data pack book.txt -o book.h5 --validation-fraction 0.1
  hpctrain data pack photos -o photos.h5                 images; the classes are the folders photos/cat, photos/dog, ...
  hpctrain data pack events/*.npz -o events.h5           one sample per file, with the fields of the first
  hpctrain data pack table.parquet -o table.h5           one sample per row
  hpctrain data pack shards -o set.h5 --from tar         samples of WebDataset tar files; mds: of MDS shards

Text becomes a token file (data.format = "tokens"), all else a file of samples of different sizes ("ragged"). The kind
is that of the files that are found. Of a single text the last part is held out. Of several documents or samples, whole
ones are held out, chosen by their names.
"""
_SHOW_EPILOG = """\
examples:
  hpctrain data show data/stdlib.h5
  hpctrain data show data/digits.h5 --json

Exit code 2: the file is damaged.
"""


def add_parser(subparsers: Any) -> None:
    what = "Pack a corpus into a token file, show the content of a data file."
    actions = add_verb(subparsers, "data", what, _EPILOG).add_subparsers(dest="action", required=True, metavar="ACTION")
    summary = "pack text files, arrays, images, tables or shards into one HDF5 file, with a held-out split"
    packing = add_action(actions, "pack", summary, _PACK_EPILOG, _pack, as_json=False)
    sources = "files and folders (default: the standard library's source)"
    packing.add_argument("sources", nargs="*", metavar="SOURCE", help=sources)
    packing.add_argument("-o", "--output", required=True, metavar="FILE", help="the HDF5 file to write")
    part = "part to hold out (default: %(default)s)"
    packing.add_argument("--validation-fraction", type=float, default=0.05, metavar="F", help=part)
    packing.add_argument("--seed", type=int, default=0, help="selects the documents to hold out (default: 0)")
    packing.add_argument("--from", dest="kind", choices=KINDS, help="kind of the sources (default: that of the files)")
    packing.add_argument("--grey", action="store_true", help="images with one channel, of shape [height, width]")
    packing.add_argument("--force", action="store_true", help="replace an existing file of any kind")
    summary = "show the content of a data file and check its checksums"
    showing = add_action(actions, "show", summary, _SHOW_EPILOG, _show)
    showing.add_argument("file", metavar="FILE", help="a data file")


def _pack(args: argparse.Namespace) -> int:
    from hpctrain.data.pack import pack
    from hpctrain.data.sample_sources import kind_of

    kind = args.kind or (kind_of(args.sources) if args.sources else "text")
    if kind != "text":
        return _pack_samples(args, kind)
    report = pack(
        args.sources, args.output, validation_fraction=args.validation_fraction, seed=args.seed, force=args.force
    )
    if not report.written:
        print(printable(f"{report.path} is up to date: same corpus, same options"))
        return 0
    documents = report.documents
    parts = [f"{count:,} {split} tokens ({documents[split]:,} documents)" for split, count in report.tokens.items()]
    skipped = f"; files skipped (not text): {report.skipped:,}" if report.skipped else ""
    links = f"; links skipped (target outside their folder): {report.links:,}" if report.links else ""
    print(printable(f"packed {' and '.join(parts)} into {report.path}{skipped}{links}"))
    return 0


def _pack_samples(args: argparse.Namespace, kind: Any) -> int:
    from hpctrain.data.pack_samples import pack_samples

    options = {"validation_fraction": args.validation_fraction, "seed": args.seed, "force": args.force}
    report = pack_samples(args.sources, args.output, kind, grey=args.grey, **options)
    print(
        printable(
            f"packed {report.train:,} training and {report.validation:,} validation samples ({kind}) with the fields "
            f"{', '.join(report.fields)} into {report.path}"
            + (f"; files skipped (of other kinds): {report.left_out:,}" if report.left_out else "")
        )
    )
    if report.stray:
        text = f"the classes would be the folders of the files, and {report.stray} is in none; move it, and pack again"
        print(printable(f"warning: no targets: {text}"), file=sys.stderr)
    if report.classes:
        print(printable(f"classes: {', '.join(f'{number} {name}' for number, name in enumerate(report.classes))}"))
    return 0


def _show(args: argparse.Namespace) -> int:
    from hpctrain.data.describe import describe, render

    found = describe(args.file)
    print(json.dumps(found, indent=2) if args.json else printable_lines(render(found)))
    damaged = [dataset["dataset"] for dataset in found["datasets"] if dataset["crc32"] == "damaged"]
    if damaged:
        raise DataError(f"{args.file} is damaged: wrong checksum of {', '.join(damaged)}")
    return 0
