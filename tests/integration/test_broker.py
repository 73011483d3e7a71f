import os
import signal

import psutil
import pytest
from kafka import KafkaProducer

from jobs.broker.kafka import admin
from jobs.refusal import Refusal
from jobs.settings import KafkaSettings
from local.platform.broker import Broker
from local.platform.ports import is_free
from local.platform.process import marked
from tests.judges import oracle

pytestmark = pytest.mark.integration

MIB = 1024 * 1024


def _produce(broker: Broker, value: bytes) -> None:
    producer = KafkaProducer(bootstrap_servers=broker.bootstrap, max_request_size=2 * MIB)
    producer.send("t", value).get(timeout=30)
    producer.close()


def _values(broker: Broker) -> list[bytes]:
    return [record.value for record in oracle.read_topic(broker.bootstrap, "t")]


def _listening(process: psutil.Process) -> set[str]:
    return {at.laddr.ip for at in process.net_connections("tcp") if at.status == psutil.CONN_LISTEN}


def test_a_broker_keeps_its_data_through_a_stop_and_a_crash(tmp_path):
    broker = Broker(home=tmp_path)
    try:
        broker.start()
        with admin(KafkaSettings(bootstrap=broker.bootstrap)) as client:
            client.create_topics({"t": {"num_partitions": 1, "replication_factor": 1}})
        _produce(broker, b"before the stop")

        broker.stop()
        assert marked(tmp_path) == []
        assert is_free(broker.port)
        broker.start()
        _produce(broker, b"x" * MIB)

        broker.kill()
        assert not broker.healthy()
        broker.start()
        assert _values(broker) == [b"before the stop", b"x" * MIB]

        assert _listening(broker.service.process()) <= {"127.0.0.1", "::ffff:127.0.0.1"}
        pid = broker.service.process().pid
        assert Broker(home=tmp_path, port=broker.port, controller_port=broker.controller_port).start().running()
        assert broker.service.process().pid == pid, "a second start left it as it was"

        os.kill(pid, signal.SIGSTOP)
        assert not broker.healthy()
    finally:
        broker.kill()
    assert marked(tmp_path) == []


def test_a_taken_port_is_refused_before_anything_starts(tmp_path):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(Refusal, match=rf"port {port} is taken by process {os.getpid()}"):
            Broker(home=tmp_path, port=port).start()
    assert list(tmp_path.iterdir()) == []


def test_a_broker_that_cannot_run_is_refused_with_its_last_words(tmp_path):
    """Its data names another node: it starts, prints the reason, and ends."""
    broker = Broker(home=tmp_path)
    data = tmp_path / "broker" / "data"
    data.mkdir(parents=True)
    (data / "meta.properties").write_text("version=1\nnode.id=7\ncluster.id=MkU3OEVBNTcwNTJENDM2Qg\n")
    with pytest.raises(Refusal, match=r"(?s)broker ended while starting.*broker\.log.*\n    .*node"):
        broker.start()
    assert marked(tmp_path) == []
