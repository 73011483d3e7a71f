import hashlib
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from jobs.refusal import Refusal
from local.jars import fetch as jars


def _jar(folder: Path, name: str) -> jars.Jar:
    content = b"bytes"
    jar = jars.Jar(
        set="spark", group="org.example", artifact=name, version="1.0", sha256=hashlib.sha256(content).hexdigest()
    )
    (folder / jar.path).parent.mkdir(exist_ok=True)
    (folder / jar.path).write_bytes(content)
    return jar


def test_the_declaration_names_every_jar_once_with_a_sum():
    declared = jars.declared()
    assert {jar.set for jar in declared} == {"spark", "s3", "broker"}
    assert len({jar.path for jar in declared}) == len(declared)
    assert all(len(jar.sha256) == 64 and int(jar.sha256, 16) for jar in declared)


def test_the_spark_sets_repeat_nothing_that_pyspark_ships():
    shipped = {path.name.rsplit("-", 1)[0] for path in jars.pyspark_folder().glob("jars/*.jar")}
    assert "spark-core_2.13" in shipped
    assert not {jar.artifact for jar in jars.declared() if jar.set != "broker"} & shipped


def test_verify_accepts_what_was_declared(tmp_path):
    jars.verify(tmp_path, [_jar(tmp_path, "a"), _jar(tmp_path, "b")])


def test_verify_refuses_another_content(tmp_path):
    jar = _jar(tmp_path, "a")
    (tmp_path / jar.path).write_bytes(b"other")
    with pytest.raises(Refusal, match=r"1 jars are missing or wrong, first spark/a-1\.0\.jar"):
        jars.verify(tmp_path, [jar])


def test_verify_refuses_a_stranger_on_the_class_path(tmp_path):
    jar = _jar(tmp_path, "a")
    stranger = _jar(tmp_path, "kafka-clients")
    with pytest.raises(Refusal, match=r"kafka-clients-1\.0\.jar"):
        jars.verify(tmp_path, [jar])
    assert jars.fetch(tmp_path, [jar]) == []
    assert not (tmp_path / stranger.path).exists()


def test_nothing_is_fetched_where_all_is_there(tmp_path, monkeypatch):
    jar = _jar(tmp_path, "a")
    monkeypatch.setenv("PATH", "")
    said = []
    assert jars.fetch(tmp_path, [jar], report=lambda *step: said.append(step)) == []
    assert not said, "nothing takes long"


def test_ivy_is_told_every_jar_and_nothing_that_follows():
    jar = jars.Jar(set="spark", group="g", artifact="a", version="1", sha256="0" * 64)
    other = replace(jar, set="broker", version="2")
    module = ElementTree.fromstring(jars.ivy_module([jar, other]))
    asked = [dict(row.attrib) for row in module.iter("dependency")]
    assert [(row["conf"], row["name"], row["rev"], row["transitive"]) for row in asked] == [
        ("spark->default", "a", "1", "false"),
        ("broker->default", "a", "2", "false"),
    ]


def test_a_mirror_takes_the_place_of_the_default():
    def resolver(mirror):
        return next(ElementTree.fromstring(jars.ivy_settings(mirror)).iter("ibiblio")).attrib

    assert "root" not in resolver(None)
    assert resolver("https://mirror.invalid/m2")["root"] == "https://mirror.invalid/m2"


@pytest.fixture
def mirror(tmp_path):
    """A repository of one jar, as a folder."""
    content = b"a published jar"
    place = tmp_path / "mirror" / "org" / "example" / "thing" / "1.0"
    place.mkdir(parents=True)
    (place / "thing-1.0.jar").write_bytes(content)
    return (tmp_path / "mirror").as_uri(), hashlib.sha256(content).hexdigest()


@pytest.mark.integration
def test_what_is_missing_is_fetched_from_the_mirror_and_checked(tmp_path, mirror):
    address, digest = mirror
    jar = jars.Jar(set="broker", group="org.example", artifact="thing", version="1.0", sha256=digest)
    folder = tmp_path / "jars"
    said = []
    assert jars.fetch(folder, [jar], mirror=address, report=lambda *step: said.append(step)) == [jar]
    assert said == [("fetching 1 jars", "up to 25 s on a fast line")]
    jars.verify(folder, [jar])
    assert [path.name for path in folder.iterdir() if path.name != ".lock"] == ["broker"]


@pytest.mark.integration
def test_a_changed_jar_is_refused_and_never_put_in_place(tmp_path, mirror):
    address, _ = mirror
    jar = jars.Jar(set="broker", group="org.example", artifact="thing", version="1.0", sha256="0" * 64)
    folder = tmp_path / "jars"
    with pytest.raises(Refusal, match="the file was changed on the way or in the repository"):
        jars.fetch(folder, [jar], mirror=address)
    assert not (folder / jar.path).exists()


@pytest.mark.integration
def test_a_repository_without_the_jar_is_refused_with_the_way_out(tmp_path, mirror):
    address, digest = mirror
    jar = jars.Jar(set="broker", group="org.example", artifact="other", version="1.0", sha256=digest)
    with pytest.raises(Refusal, match=r"org.example#other;1.0.*set TIDELINE_MAVEN_URL"):
        jars.fetch(tmp_path / "jars", [jar], mirror=address)
