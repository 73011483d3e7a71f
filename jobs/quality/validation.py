"""The only code that uses Great Expectations. Its import takes seconds, so only functions that need it import it."""

import copy
import functools
import importlib
import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from types import SimpleNamespace
from typing import Any

import pandas as pd

from jobs.quality.suite import Rule

_WHOLE_ROWS = "whole"


class CouldNotCheckError(Exception):
    """An expectation could not be evaluated. This is no verdict on the data, so the caller should try again."""


@dataclass(frozen=True, kw_only=True)
class Validation:
    """The broken rules, each with the number of rows that break it, and the result of Great Expectations itself."""

    broken: tuple[tuple[Rule, int], ...]
    result: Any


def validate(frame: Any, rules: Sequence[Rule], *, name: str) -> Validation:
    """Judge all rows of a frame of pandas or Spark by all rules at once."""
    library = _library()
    suite = library.gx.ExpectationSuite(name, expectations=[_expectation(library, rule) for rule in rules])
    try:
        result = _batch(library, frame, name).validate(suite, result_format="SUMMARY")
    except Exception as error:
        raise CouldNotCheckError(f"{name}: Great Expectations failed: {error}") from error
    return Validation(broken=_broken(rules, result, name), result=result)


def render(result: Any) -> str:
    """The Data Docs of a result, without the page around them, which would load its style from the internet."""
    library = _library()
    shown = copy.deepcopy(result)
    for one in shown.results:
        one.result = _as_text(one.result)
    document = library.page_renderer().render(shown)
    # The first section begins with a link to a page of the suite, which is not written. It ends with a link of the
    # library. Only the block between them is kept.
    document.sections[0].content_blocks = document.sections[0].content_blocks[1:2]
    view = library.section_view()
    sections = [section.to_json_dict() for section in document.sections]
    return "\n".join(
        view.render({"section": section, "section_loop": {"index": number}})
        for number, section in enumerate(sections, start=1)
    )


def _as_text(value: Any) -> Any:
    """Escape all text of a result, so that it is safe in a page: the renderer does not escape the parts of a row."""
    if isinstance(value, dict):
        return {name: _as_text(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_as_text(part) for part in value]
    if isinstance(value, tuple):
        return ", ".join(str(_as_text(part)) for part in value)
    return escape(value) if isinstance(value, str) else value


def _broken(rules: Sequence[Rule], result: Any, name: str) -> tuple[tuple[Rule, int], ...]:
    broken = []
    by_sentence = {rule.sentence: rule for rule in rules}
    for one in result.results:
        rule = by_sentence.pop(one.expectation_config.meta["sentence"])
        raised = next(_raised(one.exception_info), None)
        if raised is not None:
            raise CouldNotCheckError(f"{name}: {rule.sentence!r} could not be checked: {raised}")
        if not one.success:
            broken.append((rule, _failed(one, rule, name)))
    if by_sentence:
        raise CouldNotCheckError(f"{name}: Great Expectations returned no result for {list(by_sentence)}")
    return tuple(broken)


def _failed(one: Any, rule: Rule, name: str) -> int:
    failed = one.result.get("unexpected_count")
    if not failed:
        raise CouldNotCheckError(f"{name}: {rule.sentence!r} failed, but with no failing row: {one.result}")
    return int(failed)


def _raised(info: Mapping[str, Any] | None) -> Iterator[str]:
    """The errors of the expectation itself, or of the metrics that it needs."""
    if not info:
        return
    if "raised_exception" in info:
        if info["raised_exception"]:
            yield str(info.get("exception_message"))
        return
    for nested in info.values():
        if isinstance(nested, Mapping):
            yield from _raised(nested)


def _batch(library: SimpleNamespace, frame: Any, name: str) -> Any:
    context = library.gx.get_context(mode="ephemeral", project_config=library.project())
    context.variables.progress_bars = {"globally": False}
    sources = context.data_sources
    # `SparkRows` already keeps the rows in memory and on disk, so the library must not keep them once more.
    source = sources.add_pandas(name) if isinstance(frame, pd.DataFrame) else sources.add_spark(name, persist=False)
    definition = source.add_dataframe_asset(name).add_batch_definition_whole_dataframe(_WHOLE_ROWS)
    return definition.get_batch({"dataframe": frame})


def _expectation(library: SimpleNamespace, rule: Rule) -> Any:
    return library.classes[rule.type](
        **rule.arguments, severity=str(rule.severity), description=rule.sentence, meta={"sentence": rule.sentence}
    )


@functools.cache
def _library() -> SimpleNamespace:
    """Import Great Expectations without its messages: it logs each of its functions, and one of its modules warns."""
    logging.getLogger("great_expectations").setLevel(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import great_expectations as gx
        from great_expectations.data_context.types.base import DataContextConfig, InMemoryStoreBackendDefaults
        from great_expectations.render.renderer.page_renderer import ValidationResultsPageRenderer
        from great_expectations.render.view.view import DefaultJinjaSectionView

        # The package has these classes but does not export them, so a type checker refuses a plain import.
        expectations: Any = importlib.import_module("great_expectations.expectations")

        class ExpectColumnValuesToBeWithin(expectations.ExpectColumnValuesToBeBetween):  # type: ignore[misc]
            """Keeps integers as bounds. The parent makes them floats, and Spark then compares a DECIMAL as a DOUBLE."""

            min_value: int | float | None = None
            max_value: int | float | None = None

    def project() -> Any:
        # By default the library makes a folder for Data Docs, which is not needed.
        return DataContextConfig(store_backend_defaults=InMemoryStoreBackendDefaults(init_temp_docs_sites=False))

    classes: Iterable[Any] = (
        expectations.ExpectColumnValuesToNotBeNull,
        expectations.ExpectCompoundColumnsToBeUnique,
        expectations.ExpectColumnPairValuesToBeEqual,
        expectations.ExpectColumnPairValuesAToBeGreaterThanB,
    )
    by_type = {known.expectation_type: known for known in classes}
    by_type[expectations.ExpectColumnValuesToBeBetween.expectation_type] = ExpectColumnValuesToBeWithin
    return SimpleNamespace(
        gx=gx,
        project=project,
        classes=by_type,
        page_renderer=ValidationResultsPageRenderer,
        section_view=DefaultJinjaSectionView,
    )
