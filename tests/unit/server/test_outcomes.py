"""POST /v1/outcomes: what a task that succeeds has cost, by the machine's time."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from headway.telemetry.tasks import MAX_GROUPS, OTHER, MachineTime, Retries, Tasks
from in_process import InProcess, fake_state
from telemetry_cases import step

MESSAGES = [{"role": "user", "content": "Tell me of rivers."}]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcess]:
    folder = tmp_path_factory.mktemp("state")
    state = fake_state(data_dir=str(folder), price_per_hour=3600.0)
    state.rows[0].telemetry.price_per_hour = 3600.0
    served = InProcess(folder, state)
    try:
        yield served
    finally:
        served.close()


def ask(live: InProcess, headers: dict[str, str] | None = None, **fields: Any) -> str:
    """The id of one chat."""
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 4, **fields}
    answer = requests.post(live.url + "/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.headers["x-request-id"]


def judge(live: InProcess, task: Any, success: Any = True) -> int:
    body = {"task_id": task, "success": success}
    return requests.post(live.url + "/v1/outcomes", json=body).status_code


def figure(live: InProcess, name: str, /, **labels: str) -> float:
    text = requests.get(live.url + "/metrics").text
    for line in text.splitlines():
        head, _, value = line.rpartition(" ")
        wanted = all(f'{key}="{each}"' in head for key, each in labels.items())
        if re.match(rf"headway:{name}(_total)?\{{", head) and wanted:
            return float(value)
    raise AssertionError(f"there is no {name} with {labels}")


def test_a_task_that_succeeds_costs_all_that_was_tried(live: InProcess) -> None:
    ask(live, metadata={"task_id": "t1", "task": "sums"})
    ask(live, metadata={"task_id": "t1", "task": "sums"})
    ask(live, {"x-headway-task-id": "t2", "x-headway-task": "sums"})
    ask(live, {"x-headway-task": "other"})
    assert [judge(live, "t1"), judge(live, "t2", False), judge(live, "t3")] == [200, 200, 404]
    spent = figure(live, "task_cost_usd", dimension="task", name="sums")
    assert spent > 0
    for group in ({"dimension": "task", "name": "sums"}, {"dimension": "all", "name": ""}):
        cost = figure(live, "cost_per_success_usd", **group)
        assert cost == pytest.approx(spent), "the failed task and both tries are in it"
        assert figure(live, "tasks_judged", **group, outcome="success") == 1
        assert figure(live, "tasks_judged", **group, outcome="failure") == 1
    assert judge(live, "t2", True) == 200
    cost = figure(live, "cost_per_success_usd", dimension="task", name="sums")
    assert cost == pytest.approx(spent / 2), "the last word holds"
    rows = requests.get(live.url + "/stats").json()["tasks"]
    assert (rows[0]["dimension"], rows[0]["name"]) == ("all", "")
    (sums,) = (row for row in rows if (row["dimension"], row["name"]) == ("task", "sums"))
    assert (sums["requests"], sums["succeeded"], sums["failed"]) == (3, 2, 0)
    assert sums["usd_per_success"] == pytest.approx(spent / 2)


def test_a_library_that_sends_again_works_at_the_same_task(live: InProcess) -> None:
    first = ask(live, max_tokens=3)
    again = ask(live, {"x-stainless-retry-count": "1"}, max_tokens=3)
    assert (judge(live, first), judge(live, again)) == (200, 404)


@pytest.mark.parametrize("fields", [{"task_id": 5}, {"task_id": ""}, {"task_id": "x" * 201}])
def test_a_name_that_is_none_is_refused(live: InProcess, fields: dict[str, Any]) -> None:
    if fields["task_id"] != "":
        body = {"model": "tiny", "messages": MESSAGES, "metadata": fields}
        answer = requests.post(live.url + "/v1/chat/completions", json=body)
        assert answer.json()["error"]["param"] == "metadata.task_id"
    assert judge(live, fields["task_id"]) == 400


@pytest.mark.parametrize(
    ("field", "value"), [("task_id", ""), ("source", ""), ("source", "x" * 65)]
)
def test_a_word_of_a_wrong_length_is_refused_by_its_name(
    live: InProcess, field: str, value: str
) -> None:
    body = {"task_id": "t1", "success": True, field: value}
    answer = requests.post(live.url + "/v1/outcomes", json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == field and field in error["message"]


def test_time_is_divided_among_prompts_and_answers() -> None:
    time = MachineTime()
    assert time.seconds(10, 10) == 0.0
    times = {"schedule_s": 0.0, "execute_s": 1.0, "update_s": 0.0}
    decode = {"num_decode_tokens": 100, "num_sampled": 100}
    time.add(step(num_tokens=100, **decode, **times))
    time.add(step(num_tokens=400, **decode, **times))
    assert time.seconds(300, 0) == pytest.approx(0.75)
    assert time.seconds(0, 200) == pytest.approx(1.25)


def test_groups_without_end_become_one() -> None:
    tasks = Tasks()
    for number in range(MAX_GROUPS + 5):
        tasks.spend("me", f"t{number}", f"class {number}", "tiny", 1.0)
    assert tasks.totals["task", OTHER].dollars == 5.0
    assert tasks.totals["all", ""].requests == MAX_GROUPS + 5
    assert tasks.judge("me", "t0", True) and not tasks.judge("you", "t0", True)
    tasks.check_integrity()


def test_what_comes_after_an_outcome_counts_too() -> None:
    tasks = Tasks()
    tasks.spend("me", "t", "a", "tiny", 1.0)
    assert tasks.judge("me", "t", True)
    tasks.spend("me", "t", "a", "big", 2.0)
    assert tasks.totals["all", ""].cost_per_success == 3.0
    assert tasks.totals["route", "big"].cost_per_success == 2.0
    tasks.check_integrity()


def test_a_retry_is_recognized_by_its_body() -> None:
    retries = Retries()
    assert retries.task_of("me", 1, False, "a") == "a"
    assert retries.task_of("me", 1, True, "b") == "a"
    assert retries.task_of("you", 1, True, "c") == "c"
    assert retries.task_of("me", 1, False, "d") == "d"
