"""The service's console, in a real browser, and its metrics."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mission_control.bench.browser import browser, chromium
from mission_control.bench.console import enter, members
from mission_control.bench.service import serving_processes

in_a_browser = pytest.mark.skipif(chromium() is None, reason="there is no chromium on the path")

COUNT = "Number(by('found').textContent.split(' ')[0].replaceAll(',', ''))"


def get(address: str, token: str | None = None) -> tuple[int, str]:
    request = urllib.request.Request(address)
    if token is not None:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@in_a_browser
def test_a_person_finds_what_they_look_for_and_changes_what_they_may():
    with serving_processes(None, 1) as own, members(own, 2, 60), browser() as page:
        address = f"http://127.0.0.1:{own.ports[0]}"
        enter(page, address, own.tokens["viewer"])
        page.until(f"{COUNT} === 120")
        # The fastest ones first, each with its own numbers.
        rates = page.run("[...document.querySelectorAll('#rows tr[data-row]')].map(row => row.cells[7].textContent)")
        numbers = [float(rate.split()[0]) for rate in rates]
        assert numbers == sorted(numbers, reverse=True) and numbers[0] > numbers[-1]
        # With the keyboard alone: the address contains the search and the row.
        page.press("/")
        for letter in "gather job-3":
            page.press(letter)
        page.until(f"{COUNT} < 10 && {COUNT} > 0")
        assert page.run(
            "[...document.querySelectorAll('#rows tr[data-row]')].every(row => /gather/.test(row.innerText))"
        )
        page.press("Escape")
        page.press("ArrowDown")
        page.until("!by('detail').hidden && /its own part of 12 objects/.test(by('detail').innerText)")
        place = page.run("location.hash")
        assert "q=gather" in place and "row=" in place
        page.press("t")
        assert page.run("document.documentElement.dataset.theme") == "dark"
        # A link shows others the same view; it does not contain the token.
        assert own.tokens["viewer"] not in place
        page.run("location.hash = '#view=transfers&job=job-3&sort=name'")
        page.until(f"{COUNT} === 20")
        page.press("2")
        page.until(f"{COUNT} === 12")
        assert not page.run("document.querySelector('#rows input, #rows select, #policy select') !== null"), (
            "it may not"
        )
        page.press("3")
        page.until(f"{COUNT} === 1")
        page.press("4")
        page.until("/cluster 0 joined with 1 host/.test(by('rows').innerText)")
        # The operator changes a priority and the policy, and sees both. Leaving a field does not submit it.
        page.run(f"sessionStorage.setItem('token', {own.tokens['operator']!r}); location.hash = '#view=jobs'")
        page.until("document.querySelector('#rows input') && document.querySelector('#policy select')")
        page.run("window.asked = []; window.confirm = question => { asked.push(question); return true; }")
        field = "document.querySelector('#rows input')"
        page.run(f"{field}.focus(); {field}.select()")
        for key in ("9", "Escape", "Tab"):
            page.press(key)
        page.run(f"{field}.focus(); {field}.select()")
        for key in ("7", "Enter"):
            page.press(key)
        page.until("status.jobs.filter(job => job.priority === 7).length === 1")
        assert not page.run("status.jobs.some(job => job.priority === 9)")
        page.run(
            "(() => { const choice = document.querySelector('#policy select'); choice.value = 'priority'; "
            "choice.dispatchEvent(new Event('change')); })()"
        )
        page.until("/policy priority/.test(by('line').textContent)")
        assert page.run("asked") == ["Have all clusters share their hosts by priority in place of fair?"]
        # The page while the service does not answer.
        own.processes[0].kill()
        page.until("/does not answer/.test(by('problems').innerText)")
        assert page.errors == []


@in_a_browser
def test_a_row_far_down_can_be_chosen_and_stays_what_it_is():
    with serving_processes(None, 1) as own, members(own, 2, 400), browser() as page:
        enter(page, f"http://127.0.0.1:{own.ports[0]}", own.tokens["viewer"])
        page.run("location.hash = '#view=transfers&sort=name'")
        page.until(f"{COUNT} === 800 && list[1].from === 'read-1'")
        page.run("by('scroll').scrollTop = 400 * ROW_PX")
        page.until("page.offset > 300 && document.querySelector('#rows tr[data-row]') !== null")
        page.until("by('scroll').scrollTop === 400 * ROW_PX")
        page.run("document.querySelectorAll('#rows tr[data-row]')[15].cells[1].click()")
        chosen = page.run("document.querySelectorAll('#rows tr[data-row]')[15].cells[1].textContent")
        page.until("!by('detail').hidden")
        assert chosen in page.run("by('detail').innerText") and page.run("by('scroll').scrollTop") > 300
        # Fewer rows than before: the remaining ones are shown.
        page.run("by('search').value = 'read-7 '; by('search').dispatchEvent(new Event('input'))")
        page.until(f"{COUNT} < 800 && document.querySelectorAll('#rows tr[data-row]').length > 0")
        assert page.errors == []


@in_a_browser
def test_who_has_no_token_sees_the_page_and_no_job():
    with serving_processes(None, 1) as own, members(own, 1, 20), browser() as page:
        address = f"http://127.0.0.1:{own.ports[0]}"
        for path in ("/v1/transfers", "/v1/status", "/v1/rates", "/v1/history", "/metrics"):
            assert get(address + path)[0] == 401
            assert get(address + path, own.tokens["cluster"])[0] == 403
        page.open(f"{address}/")
        page.until("document.querySelector('#ask')?.open")
        page.run("by('token').value = 'wrong'; document.querySelector('#ask button').click()")
        page.until("/not a token of the service/.test(by('refused').textContent) && by('ask').open")
        page.run(f"by('token').value = {own.tokens['cluster']!r}; document.querySelector('#ask button').click()")
        page.until("/cannot read/.test(by('refused').textContent) && by('ask').open")
        assert "job-0" not in page.run("document.body.innerText") and page.errors == []


@in_a_browser
def test_a_name_is_no_markup():
    with serving_processes(None, 1) as own, members(own, 1, 20), browser() as page:
        enter(page, f"http://127.0.0.1:{own.ports[0]}", own.tokens["viewer"])
        page.run("page.rows[0].job = '<img src=x onerror=window.bad=1>'; page.rows[0].reason = '<b>x</b>'; draw()")
        assert page.run("document.querySelectorAll('#rows img, #rows b').length") == 0
        assert page.run("window.bad") is None


def test_metrics_are_what_prometheus_reads():
    with serving_processes(None, 1) as own, members(own, 2, 20):
        status, text = get(f"http://127.0.0.1:{own.ports[0]}/metrics", own.tokens["viewer"])
        assert status == 200
        found = {family.name: family.samples for family in text_string_to_metric_families(text)}
        prefix = "mission_control_service"
        assert [sample.value for sample in found[f"{prefix}_leads"]] == [1.0]
        assert {sample.labels["cluster"]: sample.value for sample in found[f"{prefix}_cluster_transfers"]} == {
            "0": 20.0,
            "1": 20.0,
        }
        assert len(found[f"{prefix}_job_weight"]) == 4


def test_questions_that_make_no_sense_are_answered_by_what_there_is():
    with serving_processes(None, 1) as own, members(own, 1, 20):
        address, token = f"http://127.0.0.1:{own.ports[0]}", own.tokens["viewer"]
        for query, said in [
            ("transfers?sort=colour", "use rate"),
            ("transfers?most=-1", "a number"),
            ("transfers?colour=red", "use q, cluster"),
            ("history?most=x", "most=NUMBER"),
        ]:
            status, text = get(f"{address}/v1/{query}", token)
            assert status == 400 and said in json.loads(text)["error"], text
        page = json.loads(get(f"{address}/v1/transfers?q=read-1+SUM&most=3&offset=1&sort=name&ascending=1", token)[1])
        assert page["active"] == 20 and page["found"] == 11
        # Those whose names have read-1, the last one in the order of names first, without it.
        assert [row["from"] for row in page["rows"]] == ["read-18", "read-17", "read-16"]
