"""The quickstart's agents: rows, conversations, and a tokenizer in which a call takes few tokens."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from asyncrl.chat.renderer import RendererChat
from asyncrl.environments.search.environment import STYLES as SEARCH
from asyncrl.environments.tools.interpreter import STYLES as PYTHON
from asyncrl.environments.tools.styles import Tagged
from asyncrl.quickstart.agents import AGENTS, CHAT_TEMPLATE, END, write_rows
from asyncrl.quickstart.byte_tokenizer import EOS_ID, save_byte_tokenizer
from asyncrl.quickstart.modes import is_held_out
from asyncrl.quickstart.questions import Facts, Sums
from asyncrl.rewards.library.question_answering import qa_exact_match

CALCULATOR = AGENTS["calculator"]


@pytest.mark.parametrize("name", AGENTS)
def test_the_files_have_right_answers_no_question_twice_and_none_in_both(name: str, tmp_path: Path) -> None:
    agent = AGENTS[name]
    write_rows(agent, tmp_path, seed=1, train_rows=300, eval_rows=40)
    train, heldout = (
        [json.loads(line) for line in (tmp_path / f"{split}.jsonl").read_text().splitlines()]
        for split in ("train", "heldout")
    )
    asked = [row["prompt"][0]["content"] for row in train + heldout]
    assert (len(train), len(heldout), len(set(asked))) == (300, 40, 340)
    assert [is_held_out(each) for each in asked] == [False] * 300 + [True] * 40
    assert all(row["answer"] == agent.questions.answer(each) for row, each in zip(train + heldout, asked, strict=True))
    assert (tmp_path / "corpus.jsonl").exists() == (name == "search")


def test_sums_are_right_and_every_fact_stands_in_the_corpus_once(tmp_path: Path) -> None:
    sums, facts = Sums(), Facts()
    assert [sums.answer(each) for each in ("37*52", "10-99", "99+99")] == ["1924", "-89", "198"]
    write_rows(AGENTS["search"], tmp_path, seed=0, train_rows=1, eval_rows=1)
    passages = [json.loads(line) for line in (tmp_path / "corpus.jsonl").read_text().splitlines()]
    assert {each["title"]: each["text"] for each in passages} == {key: facts.answer(key) for key in facts.all()}
    assert len(passages) == 10 * 9 * 8 * 7
    assert not {each["title"] for each in passages} & {each["text"] for each in passages}


@pytest.mark.parametrize("name", AGENTS)
def test_the_warm_up_mostly_guesses_and_of_its_calls_few_are_answered_by_what_they_gave(name: str) -> None:
    agent, rng = AGENTS[name], random.Random(0)
    made = [agent.warmup_conversation(rng) for _ in range(4000)]
    assert not any(is_held_out(parts[0][0].rstrip(">")) for parts in made)
    calls = [parts for parts in made if len(parts) == 4]
    right = [parts for parts in calls if parts == agent.right_conversation(parts[0][0].rstrip(">"))]
    assert 0.35 < len(calls) / len(made) < 0.45 and 0.08 < len(right) / len(made) < 0.15


def test_a_conversation_with_the_calculator_is_what_the_chat_makes_of_its_turns(tmp_path: Path) -> None:
    save_byte_tokenizer(tmp_path, CALCULATOR.phrases, CHAT_TEMPLATE)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=False)
    chat = RendererChat(tokenizer, "default", {"tool_parser": "qwen3"}, chosen=True)
    (asked, _), (call, _), (given, _), (said, _) = CALCULATOR.right_conversation("37*52")

    prompt = chat.render([{"role": "user", "content": "37*52"}])
    assert tokenizer.decode(prompt) == asked
    sampled = chat.encode(call, add_special_tokens=False)
    assert len(sampled) == 5 + len(CALCULATOR.phrases) + 1 and sampled[-1] == EOS_ID
    reply = chat.parse(sampled, prompt=prompt, finish_reason="stop")
    (made,) = reply.tool_calls
    assert (made.name, made.arguments, made.error) == ("calculate", {"expression": "37*52"}, "")
    answer = {"role": "tool", "tool_call_id": made.id, "name": made.name, "content": "1924"}
    assert tokenizer.decode(chat.extend(prompt, sampled, [answer])) == given
    assert said == f"1924{END}"


@pytest.mark.parametrize(("name", "styles"), [("python", PYTHON), ("search", SEARCH)])
def test_a_call_by_tags_ends_where_its_environment_stops_and_reads_what_that_inserts(name: str, styles: dict) -> None:
    style, agent = styles["tag"][0], AGENTS[name]
    assert isinstance(style, Tagged)
    question = agent.sample(random.Random(0), held_out=True)
    _, (call, _), (given, _), (said, _) = agent.right_conversation(question)
    assert call == f"<{style.tag}>{question}</{style.tag}>" and call.endswith(style.stop[0])
    assert given.startswith(f"\n<{style.result}>\n") and given.endswith(f"\n</{style.result}>\n")
    assert not style.final or said.endswith(style.stop[1])


def test_a_hedge_is_no_right_answer() -> None:
    for agent in AGENTS.values():
        question = agent.sample(random.Random(0), held_out=False)
        row = {"answer": agent.questions.answer(question)}
        right, hedged = agent.right_conversation(question)[-1][0], agent.right_conversation(question, hedge="maybe ")
        if agent.said[0]:
            assert qa_exact_match(right, row) == 1 and qa_exact_match(hedged[-1][0], row) == 0
        else:
            assert right.removesuffix(END) == row["answer"] and agent.hedge
