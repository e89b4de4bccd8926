"""What goes over the wire: frames, both encodings, replays, loss, a sender that cannot keep up, the end."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("zmq")
pytest.importorskip("msgspec")
pytest.importorskip("radixview")

import msgspec
import zmq

from hiradix.errors import ConfigError
from hiradix.events import KVEvents, KVEventsConfig, Naming, open_publisher, parse_kv_events_config
from hiradix.events.publisher import Publisher
from hiradix.tree import RadixKey, RadixTree
from tests.events.model import Router
from tests.events.subscriber import DEADLINE_S, Subscriber
from tests.events.test_names import PLAIN, insert
from tests.tree.test_fuzz import config_of
from tests.tree.world import World

LOCAL = "tcp://127.0.0.1:0"


def on_loopback(**values: object) -> KVEventsConfig:
    return KVEventsConfig("zmq", **{"endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0", **values})


class Rig:
    """A tree, its publisher and one subscriber."""

    def __init__(self, tree: RadixTree, **values: object):
        self.tree = tree
        self.config = on_loopback(**values)
        self.events = KVEvents(tree, Naming(is_dynamo=True))
        self.publisher = Publisher(self.config, self.events, "127.0.0.1")
        self.subscriber = Subscriber(
            self.publisher.describe(tree.page_size), values.get("encoding") == "array"
        )

    def router(self) -> Router:
        """A reader of everything that was sent when the queue was empty."""
        router = Router(self.tree.page_size)
        router.read(self.subscriber.catch_up(self.settled()))
        return router

    def settled(self) -> int:
        """The number of messages once the sender has nothing to send."""
        until = time.monotonic() + DEADLINE_S
        while self.publisher.figures()["num_waiting"]:
            assert time.monotonic() < until, self.publisher.figures()
        return self.publisher.num_sent

    def close(self) -> None:
        self.publisher.close()
        self.subscriber.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig(RadixTree(4))
    yield rig
    rig.close()


def test_frames_are_topic_number_and_payload() -> None:
    rig = Rig(RadixTree(4), topic="kv")
    raw = zmq.Context()
    try:
        sub = raw.socket(zmq.SUB)
        sub.connect(f"tcp://127.0.0.1:{rig.publisher.describe(4)['endpoint_port_base']}")
        sub.set(zmq.SUBSCRIBE, b"kv")
        tokens = iter(range(1000, 100_000))
        frames = None
        while frames is None:  # until the subscription has arrived
            insert(rig.tree, RadixKey([1, 2, 3, next(tokens)]), next(tokens))
            rig.publisher.flush()
            frames = sub.recv_multipart() if sub.poll(100) else None
        topic, number, payload = frames
        assert topic == b"kv" and len(number) == 8
        time_s, events, rank = msgspec.msgpack.decode(payload)
        assert time_s > 1e9 and rank == 0 and events[0]["type"] == "BlockStored"
        assert list(events[0]) == [
            "type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
        ]  # fmt: skip
    finally:
        raw.destroy(linger=0)
        rig.close()


@pytest.mark.parametrize("encoding", ["map", "array"])
def test_a_subscriber_that_came_late_replays_what_it_missed(encoding: str) -> None:
    rig = Rig(RadixTree(4), encoding=encoding)
    try:
        insert(rig.tree, RadixKey(range(1, 9)))
        rig.publisher.flush()
        insert(rig.tree, RadixKey(range(11, 19)), 5)
        rig.publisher.flush()
        rig.tree.evict(0, 0, 99)
        rig.publisher.flush()
        assert rig.settled() == 3
        assert rig.subscriber.replay(1) == [1, 2]
        assert rig.subscriber.replay(0) == [0, 1, 2]
        assert rig.subscriber.replay(7) == []
        first, second, third = (rig.subscriber.batches[i] for i in range(3))
        assert first[0].block_hashes == PLAIN and len(second) == 1 and len(third[0].block_hashes) == 4
    finally:
        rig.close()


def test_messages_lost_on_the_way_are_replayed_and_nothing_is_wrong_after() -> None:
    """A tree driven at random, every third message lost: after a replay the picture is exact."""
    world = World(config_of(1))
    other = Rig(world.tree)
    rng = random.Random(1)
    moves, weights = list(World.MOVES), list(World.MOVES.values())
    try:
        for _ in range(200):
            getattr(world, rng.choices(moves, weights)[0])(rng.randrange)
            other.publisher.flush()
        sent = other.settled()
        other.subscriber.replay(0)
        for lost in range(0, sent, 3):
            del other.subscriber.batches[lost]
        router = other.router()
        router.check(world.tree, True)
        assert sent > 50
    finally:
        world.drain()
        other.close()


def test_only_the_last_steps_are_kept_for_replay() -> None:
    rig = Rig(RadixTree(4), buffer_steps=3)
    try:
        for i in range(8):
            insert(rig.tree, RadixKey([i, 1, 2, 3]), 10 * i)
            rig.publisher.flush()
        rig.settled()
        assert rig.subscriber.replay(0) == [5, 6, 7]
    finally:
        rig.close()


def test_a_sender_that_falls_behind_tells_everything_anew() -> None:
    """While it is stuck steps are dropped, never waited for; then the picture is exact, and numbers go on."""
    rig = Rig(RadixTree(4), max_queue_size=4)
    stuck, going = threading.Event(), threading.Event()
    events_of = rig.events.events_of

    def slow(notes):
        stuck.set()
        assert going.wait(DEADLINE_S)
        return events_of(notes)

    rig.events.events_of = slow
    try:
        for i in range(12):
            insert(rig.tree, RadixKey([i, 1, 2, 3, 7, 7, 7, i]), 10 * i)
            rig.publisher.flush()
            assert stuck.wait(DEADLINE_S)
        assert rig.publisher.num_dropped == 1
        assert len(rig.events.take_changes()) == 0, "notes pile up while nobody can send them"
        rig.tree.evict(0, 0, 6)
        going.set()
        rig.settled()
        rig.publisher.flush()
        router = rig.router()
        router.check(rig.tree, True)
        assert len(router.media["GPU"]) == rig.tree.resident_pages(0) == 18
    finally:
        going.set()
        rig.close()


def test_a_message_that_cannot_be_made_costs_nobody_the_picture(rig: Rig) -> None:
    events_of = rig.events.events_of

    def broken(notes):
        rig.events.events_of = events_of
        raise RuntimeError("injected")

    rig.events.events_of = broken
    insert(rig.tree, RadixKey(range(1, 9)))
    rig.publisher.flush()
    rig.settled()
    insert(rig.tree, RadixKey(range(11, 15)), 5)
    rig.publisher.flush()
    rig.router().check(rig.tree, True)


def test_closing_sends_what_is_queued() -> None:
    rig = Rig(RadixTree(4))
    while rig.subscriber.live(0.1) is None:  # until the subscription has arrived
        insert(rig.tree, RadixKey([rig.publisher.num_sent + 1, 2, 3, 4]), 10 * rig.publisher.num_sent)
        rig.publisher.flush()
        rig.settled()
    for i in range(50):
        insert(rig.tree, RadixKey([5000 + i, 1, 2, 3]), 1000 + i)
        rig.publisher.flush()
    rig.publisher.close()
    sent = rig.publisher.num_sent
    while max(rig.subscriber.batches) < sent - 1:
        assert rig.subscriber.live() is not None
    assert {*range(sent - 50, sent)} <= set(rig.subscriber.batches)
    rig.close()


def test_replays_at_once_of_a_slow_subscriber_all_end() -> None:
    """What did not fit his queue was dropped, the end too, for which he waited. The others do not wait."""
    rig = Rig(RadixTree(4), buffer_steps=3)
    slow = zmq.Context()
    try:
        dealer = slow.socket(zmq.DEALER)
        dealer.set(zmq.RCVHWM, 1)
        dealer.set(zmq.RCVBUF, 4096)
        dealer.connect(f"tcp://127.0.0.1:{rig.publisher.describe(4)['replay_endpoint_port_base']}")
        large = [
            (number, bytes(8 << 20)) for number in range(3)
        ]  # more than the kernel's buffers have room for
        rig.publisher._kept.extend(large)
        for _ in range(4):
            dealer.send_multipart([b"", bytes(8)])
        assert dealer.poll(DEADLINE_S * 1000)  # he has been answered, and takes nothing
        assert rig.subscriber.replay(7) == []
        for _ in range(4):
            numbers = []
            while numbers[-1:] != [-1]:
                assert dealer.poll(DEADLINE_S * 1000), numbers
                numbers.append(int.from_bytes(dealer.recv_multipart()[-2], "big", signed=True))
            assert numbers == [0, 1, 2, -1]
    finally:
        slow.destroy(linger=0)
        rig.close()


def test_a_subscriber_that_left_in_a_replay_costs_nobody_anything() -> None:
    rig = Rig(RadixTree(4), buffer_steps=3)
    gone = zmq.Context()
    dealer = gone.socket(zmq.DEALER)
    dealer.set(zmq.RCVHWM, 1)
    dealer.connect(f"tcp://127.0.0.1:{rig.publisher.describe(4)['replay_endpoint_port_base']}")
    rig.publisher._kept.extend([(number, bytes(8 << 20)) for number in range(3)])
    for _ in range(100):
        dealer.send_multipart([b"", bytes(8)])
    assert dealer.poll(DEADLINE_S * 1000)
    gone.destroy(linger=0)
    assert rig.subscriber.replay(7) == []
    replays = rig.publisher._replays
    assert replays is not None
    deadline_s = time.monotonic() + DEADLINE_S
    while replays.num_waiting:
        assert rig.subscriber.replay(7) == []
        assert time.monotonic() < deadline_s
    rig.close()


def test_nonsense_on_the_replay_socket_is_ignored(rig: Rig) -> None:
    for frames in ([b"x"], [b"", b"short"], [b"", b"12345678", b"more"], [b""]):
        rig.subscriber._replay.send_multipart(frames)
    assert rig.subscriber.replay(0) == []


# -- configuration ------------------------------------------------------------------------------


def test_sglangs_keys_and_defaults() -> None:
    assert not parse_kv_events_config(None).is_on
    config = parse_kv_events_config('{"publisher": "zmq"}')
    assert config == KVEventsConfig(
        "zmq", "tcp://*:5557", None, 10_000, 100_000, 100_000, "", None, "default", "map"
    )
    assert config.is_on


@pytest.mark.parametrize(
    "text, complaint",
    [
        ('{"publisher": "kafka"}', "publisher: unknown value 'kafka', expected one of null, zmq"),
        ('{"publisher": "zmq", "endpont": "x"}', "endpont: unknown key"),
        ('{"endpoint": "http://x"}', "endpoint: expected tcp://HOST:PORT or ipc://PATH, got 'http://x'"),
        ('{"endpoint": "tcp://*:70000"}', "endpoint: expected"),
        ('{"replay_endpoint": "tcp://*"}', "replay_endpoint: expected"),
        ('{"buffer_steps": 0}', "buffer_steps must be >= 1, got 0"),
        ('{"buffer_steps": 99999999999999999999}', "buffer_steps must be <= "),
        ('{"hwm": 2147483648}', "hwm must be <= "),
        ('{"topic": "\\ud800"}', "topic has half a surrogate pair"),
        ('{"hwm": true}', "hwm must be int, got bool"),
        ('{"bind": 1}', "bind must be bool, got int"),
        ('{"topic": 5}', "topic must be text, got int"),
        ('{"format": "nats"}', "format: unknown value 'nats'"),
        ("{", "is not valid"),
        ("[]", "expected an object"),
    ],
)
def test_a_bad_value_is_named(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match="^--kv-events-config: .*") as error:
        parse_kv_events_config(text)
    assert complaint in str(error.value)


def test_an_endpoint_in_use_is_named(rig: Rig) -> None:
    port = rig.publisher.describe(4)["endpoint_port_base"]
    taken = on_loopback(endpoint=f"tcp://*:{port}")
    with pytest.raises(ConfigError, match=rf"endpoint: cannot bind tcp://127\.0\.0\.1:{port}: Address"):
        open_publisher(taken, RadixTree(4), "127.0.0.1", lambda: None)


def test_what_is_missing_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("zmq", "hiradix.events.publisher"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"pip install 'hiradix\[events\]'"):
        open_publisher(on_loopback(), RadixTree(4), "127.0.0.1", lambda: None)


def test_the_star_is_the_servers_own_address(rig: Rig) -> None:
    """With a server on loopback, nobody else can read what prompts consist of."""
    last = rig.publisher._pub.get(zmq.LAST_ENDPOINT).decode()
    assert last.startswith("tcp://127.0.0.1:")
    described = rig.publisher.describe(16)
    assert described["endpoint_host"] == "*" and described["block_size"] == 16
    assert set(described) == {
        "publisher", "endpoint_host", "endpoint_port_base", "topic", "block_size", "dp_size",
        "replay_endpoint_port_base",
    }  # fmt: skip


def test_a_path_cannot_be_described(tmp_path) -> None:
    config = KVEventsConfig("zmq", endpoint=f"ipc://{tmp_path}/events")
    publisher = open_publisher(config, RadixTree(4), "127.0.0.1", lambda: None)
    assert publisher.describe(4) is None
    publisher.close()
