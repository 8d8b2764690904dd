"""Surveys a source, in a separate process if reading it runs user code.

`python -m asyncrl.data.probe ANSWER_FD PARENT_PID` is internal; it reads the request from standard input.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from asyncrl.checks.architecture import of_its_decoder
from asyncrl.checks.conditions import Condition
from asyncrl.checks.machine import model_settings
from asyncrl.checks.sources import Source
from asyncrl.data.local_tokenizer import LocalTokenizer, load_local_tokenizer
from asyncrl.data.rows.opening import open_source
from asyncrl.data.survey import FIRST, SAMPLED, Survey, survey
from asyncrl.errors import AsyncRLError, ConfigError, DataError
from asyncrl.plain_values import packed, unpacked
from asyncrl.user_code import ask_process, question_of

LOOK_S = 600.0
"""Limit on the seconds for importing a user's class and reading all of its rows."""


def look_over(
    source: Source,
    model_path: str,
    *,
    limit: int | None,
    counted: int = SAMPLED,
    first: int = FIRST,
    order_by: str = "",
    options: Mapping[str, Any] | None = None,
) -> Survey:
    """Survey a source, in a separate process if that runs user code.

    Args:
        model_path: the model whose tokenizer renders and counts, if it is in a local folder.
        order_by: column that every row needs for its place in the epoch; empty for none.
        options: of the chat template, as `model.chat`.
        limit, counted, first: as in `survey`.

    Raises:
        DataError: see `survey` and `open_source`.
        ConfigError: the tokenizer cannot be read; or a user's class cannot be made, ended its process or timed out.
    """
    if not source.runs_user_code:
        return _looked(source, model_path, limit, counted, first, order_by, options)
    question = packed([asdict(source), model_path, limit, counted, first, order_by, dict(options or {})])
    doing = f"{source.key}={source.title}: importing it and reading its rows"
    alone = ". Try it alone: python -c 'import ...; print(len(...), ...[0])'"
    kind, content = unpacked(ask_process("asyncrl.data.probe", question, doing, LOOK_S, alone))
    if kind == "refused":
        raise DataError(content)
    return Survey(
        **content
        | {
            "tokens": tuple(content["tokens"]),
            "first_rows": tuple((where, row) for where, row in content["first_rows"]),
        }
    )


def tokenizer_of(model_path: str, options: Mapping[str, Any] | None = None) -> LocalTokenizer | None:
    """Raises ConfigError if the tokenizer is in a local folder but cannot be read."""
    try:
        return load_local_tokenizer(Path(model_path), options)
    except ValueError as error:
        raise ConfigError(f"model.path={model_path}: {error}") from error


def _looked(
    source: Source,
    model_path: str,
    limit: int | None,
    counted: int,
    first: int,
    order_by: str,
    options: Mapping[str, Any] | None,
) -> Survey:
    rows = open_source(source)
    try:
        if order_by:
            rows.ranks(order_by)
        known = of_its_decoder(model_settings(model_path)).get("vocab_size")
        tokenizer = tokenizer_of(model_path, options)
        return survey(rows, tokenizer, limit=limit, counted=counted, first=first, vocabulary=known)
    finally:
        rows.close()


def main(arguments: list[str]) -> None:
    question, out = question_of(arguments)
    given, model_path, *rest = unpacked(question)
    try:
        answer: list[Any] = ["found", asdict(_looked(_source(given), model_path, *rest))]
    except AsyncRLError as error:
        answer = ["refused", str(error)]
    with out:
        out.write(packed(answer))


def _source(given: dict[str, Any]) -> Source:
    where = tuple(
        Condition(**each | {"column": tuple(each["column"]), "values": tuple(each["values"])})
        for each in given["where"]
    )
    return Source(**given | {"specs": tuple(given["specs"]), "where": where})


if __name__ == "__main__":
    main(sys.argv[1:])
