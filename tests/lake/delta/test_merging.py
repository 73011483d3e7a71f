"""Small files are merged with files of similar size: little is rewritten, and few files remain."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.lake.delta.merging import GOOD_FILE_BYTES, bins

SIZES = st.integers(1000, 40_000_000) | st.integers(2000, 4000)
FILES = st.lists(st.tuples(st.sampled_from(["slice=a", "slice=b"]), SIZES), max_size=60)


def named(files: list[tuple[str, int]]) -> dict[str, int]:
    return {f"{folder}/{number}.parquet": size for number, (folder, size) in enumerate(files)}


@given(files=FILES)
def test_each_file_goes_into_one_that_is_twice_as_large(files: list[tuple[str, int]]) -> None:
    sizes, merged = named(files), list[str]()
    for found in bins(sizes):
        assert len({file.partition("/")[0] for file in found}) == 1
        assert len(found) > 1
        assert max(found.values()) * 2 <= sum(found.values()) <= GOOD_FILE_BYTES
        assert found.items() <= sizes.items()
        merged += found
    assert len(merged) == len(set(merged)), "no file is merged twice"


@given(files=FILES)
def test_no_two_files_of_one_size_are_left_if_they_make_one_of_a_good_size(files: list[tuple[str, int]]) -> None:
    sizes = named([("slice=a", size) for _, size in files if size < GOOD_FILE_BYTES / 64])
    for found in bins(sizes):
        sizes = {file: size for file, size in sizes.items() if file not in found}
    left = sorted(sizes.values())
    assert all(2 * small < large for small, large in zip(left, left[2:], strict=False))


@settings(max_examples=40, deadline=None)
@given(
    commits=st.lists(st.integers(1000, 200_000), min_size=1, max_size=300),
    every=st.integers(1, 60),
    shrink=st.sampled_from([1.0, 0.9, 0.1]),
)
def test_little_is_rewritten_and_few_files_are_left(commits: list[int], every: int, shrink: float) -> None:
    """Merged files may be smaller than their inputs together: one footer remains of many."""
    files, rewritten = dict[str, int](), 0
    for number, size in enumerate(commits):
        files[f"slice=a/{number}"] = size
        if number % every == every - 1:
            for found in list(bins(files)):
                rewritten += sum(found.values())
                files = {file: size for file, size in files.items() if file not in found}
                files[f"slice=a/merged-{number}-{len(files)}"] = max(1, round(sum(found.values()) * shrink))
            good = sum(commits) / (GOOD_FILE_BYTES / 2)
            assert len(files) <= 2 + good + math.log2(GOOD_FILE_BYTES / min(files.values()))
    total, smallest = sum(commits), min(commits)
    assert rewritten <= total * (1 + math.log2(math.e * GOOD_FILE_BYTES / smallest))


def test_files_of_a_good_size_are_left_alone() -> None:
    large = {f"slice=a/{number}": GOOD_FILE_BYTES - number for number in range(4)}
    assert list(bins(large)) == []
    assert list(bins({**large, "slice=a/x": 10, "slice=a/y": 10})) == [{"slice=a/x": 10, "slice=a/y": 10}]


def test_a_growing_file_is_not_rewritten_for_each_small_one() -> None:
    rewrites, large = 0, 1_000_000
    files = {"slice=a/large": large}
    for number in range(1000):
        files[f"slice=a/{number}"] = 1000
        for found in list(bins(files)):
            rewrites += "slice=a/large" in found
            files = {file: size for file, size in files.items() if file not in found}
            files[f"slice=a/merged-{number}"] = sum(found.values())
    assert rewrites == 1
