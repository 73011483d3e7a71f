"""The choice of small files to merge, so that a growing table is not rewritten again and again."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

# A file of this size is large enough for readers, so it is not merged any more.
GOOD_FILE_BYTES = 32 * 1024 * 1024

File = tuple[str, int]


def bins(sizes: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Yield groups of files to merge, as path -> size in bytes. All files of a group lie in one folder.

    A merged file is at least twice as large as each of its files. So n bytes are rewritten about log(n) times at most,
    and about log(n) files remain in a folder.

    >>> list(bins({"day=1/a": 500, "day=1/b": 500, "day=1/c": 9000, "day=2/d": 500}))
    [{'day=1/a': 500, 'day=1/b': 500}]
    """
    in_order = sorted(sizes.items(), key=lambda file: (_folder(file), file[1]))
    for _, files in groupby(in_order, key=_folder):
        for few in _up_to_a_good_size(files):
            if found := similar(few):
                yield found


def _up_to_a_good_size(files: Iterator[File]) -> Iterator[list[File]]:
    found = list[File]()
    for file in files:
        if sum(size for _, size in found) + file[1] > GOOD_FILE_BYTES:
            yield found
            found = []
        found.append(file)
    yield found


def similar(files: Sequence[File]) -> dict[str, int]:
    """Return the smallest files, as many as possible, so that none is larger than the others of them together.

    ``files`` must be in the order of their sizes. In the example d is larger than a, b and c together, so it is left
    out.

    >>> similar([("a", 1), ("b", 1), ("c", 2), ("d", 90)])
    {'a': 1, 'b': 1, 'c': 2}
    """
    end = total = 0
    for number, (_, size) in enumerate(files):
        if number and size <= total:
            end = number + 1
        total += size
    return dict(files[:end])


def _folder(file: File) -> str:
    # Not by Path: for thousands of files that would take longer than all other steps.
    return file[0].rpartition("/")[0]
