"""A dozen kinds of dirt, mixed with clean records, as they may come in the topic `numbers`."""

import json
import random
from collections.abc import Callable, Iterator

from tests.judges.oracle import Record

Make = Callable[[int, int, random.Random], bytes | None]


def clean(n: int, now_ms: int, chance: random.Random) -> bytes:
    return json.dumps({"id": n, "ts": now_ms - chance.randrange(3000), "value": chance.randrange(10**9) / 1e6}).encode()


def _with(**changes: object) -> Make:
    def make(n: int, now_ms: int, chance: random.Random) -> bytes:
        document = json.loads(clean(n, now_ms, chance)) | changes
        return json.dumps({name: value for name, value in document.items() if value is not ...}).encode()

    return make


def _raw(template: str) -> Make:
    return lambda n, now_ms, _chance: template.replace("<id>", str(n)).replace("<ts>", str(now_ms)).encode()


KINDS: dict[str, Make] = {
    "clean": clean,
    "late": lambda n, now, chance: _with(ts=now - 20_000 - chance.randrange(60_000))(n, now, chance),
    "ahead of the watermark's delay": lambda n, now, chance: _with(ts=now + 20_000)(n, now, chance),
    "far ahead": lambda n, now, chance: _with(ts=now + 120_000)(n, now, chance),
    "too old": lambda n, now, chance: _with(ts=now - 8 * 24 * 3600 * 1000)(n, now, chance),
    "truncated": lambda n, now, chance: clean(n, now, chance)[:-3],
    "invalid UTF-8": lambda n, now, chance: clean(n, now, chance) + b"\xff\xfe",
    "null": lambda n, now, chance: None,
    "empty": lambda n, now, chance: b"",
    "one MiB": lambda n, now, chance: _with(note="x" * (1024 * 1024 - 200))(n, now, chance),
    "field added": _with(unit="m", nested={"a": [1, 2, {"value": 3}]}),
    "field removed": _with(value=...),
    "retyped": _with(value="3.5"),
    "NaN": _raw('{"id":<id>,"ts":<ts>,"value":NaN}'),
    "beyond 2^63": _with(id=2**63),
    "value too large": _with(value=10**12),
    "value too fine": _raw('{"id":<id>,"ts":<ts>,"value":1.0000001}'),
    "nested 10,000 deep": _raw('{"id":<id>,"ts":<ts>,"value":1,"x":' + "[" * 10_000 + "]" * 10_000 + "}"),
    "time as text": _raw('{"id":<id>,"ts":"<ts>","value":1}'),
    "time as fraction": _raw('{"id":<id>,"ts":<ts>.0,"value":1}'),
    "two objects": _raw('{"id":<id>,"ts":<ts>,"value":1}{"id":<id>,"ts":<ts>,"value":1}'),
    "an array": _raw('[{"id":<id>,"ts":<ts>,"value":1}]'),
    "trailing text": _raw('{"id":<id>,"ts":<ts>,"value":1} tail'),
    "exponent": _raw('{"id":<id>,"ts":<ts>,"value":25e-6}'),
}


def records(now_ms: int, *, each: int, seed: int, kinds: dict[str, Make] = KINDS) -> list[Record]:
    """``each`` records of every kind, shuffled. Every tenth is sent twice; some have no key or a broken one."""
    return list(_records(now_ms, each=each, seed=seed, kinds=kinds))


def _records(now_ms: int, *, each: int, seed: int, kinds: dict[str, Make]) -> Iterator[Record]:
    chance = random.Random(seed)
    # Records of 1 MiB are few, or they would make up nearly all the traffic.
    names = [name for name in kinds for _ in range(each if name != "one MiB" else max(1, each // 20))]
    chance.shuffle(names)
    for n, name in enumerate(names):
        value = kinds[name](n, now_ms, chance)
        # The client refuses to send a record that has neither key nor value.
        keyless = n % 97 == 0 and value is not None
        key = None if keyless else b"\xff" if n % 89 == 0 else f"series-{chance.randrange(7)}".encode()
        record = Record(partition=-1, arrival_ms=now_ms, key=key, value=value)
        yield record
        if n % 10 == 0:
            yield record
