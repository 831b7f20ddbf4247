"""Tables of Parquet and Arrow files become samples of a ragged file, with the values that pyarrow reads itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain.data import RaggedDataset
from hpctrain.data.pack_samples import pack_samples
from hpctrain.data.sample_sources import kind_of
from hpctrain.errors import DataError

pytestmark = pytest.mark.ecosystem


def table() -> Any:
    import pyarrow

    draw = np.random.default_rng(0)
    tokens = [draw.integers(0, 99, number % 7).astype(np.int32) for number in range(5000)]
    columns = {
        "tokens": pyarrow.array(tokens),
        "pair": pyarrow.array([[number, -number] for number in range(5000)], pyarrow.list_(pyarrow.float32(), 2)),
        "label": pyarrow.array(range(5000), pyarrow.int16()),
        "good": pyarrow.array([number % 3 == 0 for number in range(5000)]),
        "text": pyarrow.array([f"é{number}" for number in range(5000)]),
        "raw": pyarrow.array([bytes(number % 4) for number in range(5000)]),
    }
    return pyarrow.table(columns)


def write_parquet(path: Path, content: Any) -> None:
    from pyarrow import parquet

    parquet.write_table(content, path.with_suffix(".parquet"), row_group_size=777)


def write_file(path: Path, content: Any) -> None:
    from pyarrow import ipc

    with ipc.new_file(path.with_suffix(".arrow"), content.schema) as file:
        file.write_table(content, 777)


def write_stream(path: Path, content: Any) -> None:
    from pyarrow import ipc

    with ipc.new_stream(path.with_suffix(".arrow"), content.schema) as file:
        file.write_table(content, 777)


@pytest.mark.parametrize("write", (write_parquet, write_file, write_stream))
def test_every_row_is_a_sample(tmp_path: Path, write: Any) -> None:
    content = table()
    folder = tmp_path / "set"
    folder.mkdir()
    write(folder / "a", content.slice(0, 3000))
    write(folder / "b", content.slice(3000))
    pack_samples([folder], tmp_path / "a.h5", kind_of([folder]), validation_fraction=0)
    dataset = RaggedDataset(tmp_path / "a.h5")
    wanted = content.to_pylist()
    assert len(dataset) == len(wanted)
    for number in (0, 1, 2999, 3000, 4999):
        found = dataset[number]
        for name, value in wanted[number].items():
            assert (
                found[name] == value if isinstance(value, (str, bytes)) else np.array_equal(found[name].numpy(), value)
            )
    assert dataset.lengths("tokens").tolist() == [len(row["tokens"]) for row in wanted]


def test_what_is_no_number_is_named(tmp_path: Path) -> None:
    import pyarrow

    for column, told in (
        (pyarrow.array([1, None]), "the column x has missing values"),
        (pyarrow.array([[1, None], []]), "the column x is list<.*allowed are lists of numbers"),
        (pyarrow.array([{"a": 1}, {"a": 2}]), "the column x is struct<.*allowed are numbers"),
        (pyarrow.array([["a"], []]), "the column x is list<.*allowed are lists of numbers"),
    ):
        write_parquet(tmp_path / "a", pyarrow.table({"x": column}))
        with pytest.raises(DataError, match=rf"a\.parquet: {told}"):
            pack_samples([tmp_path], tmp_path / "out.h5", "parquet")
        assert not (tmp_path / "out.h5").exists()
    (tmp_path / "a.parquet").write_bytes(b"PAR1 damaged")
    with pytest.raises(DataError, match=r"cannot read .*a\.parquet"):
        pack_samples([tmp_path], tmp_path / "out.h5", "parquet")
