from __future__ import annotations

import http.client
import json
import shutil
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest
from show_fixtures import line, make
from viewing import viewer


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    shown = make(folder, [line(f"question {n}", f"answer {n}") for n in range(30)])
    with viewer(shown.path, folder) as url:
        port = urlsplit(url).port

        def ask(path: str, method: str = "GET", **headers: str):
            connection = http.client.HTTPConnection("127.0.0.1", port)
            connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
            answer = connection.getresponse()
            said = answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
            connection.close()
            return said

        yield ask


def test_the_server_listens_only_on_localhost(asked):
    assert asked("/")[0] == 200


@pytest.mark.parametrize("path", ["/", "/page/page.js", "/api/about", "/page/none.js", "/none"])
def test_every_response_forbids_what_the_page_does_not_need(asked, path):
    _, headers, _ = asked(path)
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self'" in policy and "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy and "http" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-store"
    assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "127.0.0.1@evil.example"]
)
def test_other_host_names_are_refused(asked, host):
    status, _, body = asked("/api/about", Host=host)
    assert (status, b"episodes" in body) == (421, False)


@pytest.mark.parametrize("host", ["localhost", "localhost:1", "127.0.0.1:8080", "[::1]:9"])
def test_names_of_this_machine_are_accepted_also_through_a_tunnel(asked, host):
    assert asked("/api/about", Host=host)[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_changed(asked, method):
    assert asked("/api/about", method)[0] == 405


def test_requests_from_other_sites_are_refused(asked):
    assert asked("/api/about", Sec_Fetch_Site="cross-site")[0] == 403
    assert asked("/api/about", Sec_Fetch_Site="same-site")[0] == 403
    assert asked("/api/about", Sec_Fetch_Site="same-origin")[0] == 200


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://127.0.0.1:1", "http://127.0.0.1.evil.example"]
)
def test_requests_from_another_origin_are_refused(asked, origin):
    assert asked("/api/about", Origin=origin, Host="127.0.0.1:80")[0] == 403
    assert asked("/api/about", Origin="http://127.0.0.1:80", Host="127.0.0.1:80")[0] == 200


@pytest.mark.parametrize("number", ["9" * 5000, "9" * 19, "-1", "1_0", "%D9%A3", "0x1", "1.0", ""])
@pytest.mark.parametrize("path", ["/api/train/episode/{}", "/api/train/episode/0/token/{}", "/api/audit/{}/step/0"])
def test_an_invalid_episode_number_is_not_found(asked, path, number):
    assert asked(path.format(number))[0] == 404


@pytest.mark.parametrize("number", ["9" * 5000, "9" * 19, "1_0", "%D9%A3", "0x1", "nan", "inf", "%00", "+", "1e999"])
@pytest.mark.parametrize("name", ["start", "limit", "least", "share_from"])
def test_an_invalid_number_in_a_query_is_one_error_line(asked, name, number):
    status, _, body = asked(f"/api/train/episodes?{name}={number}")
    assert (status, json.loads(body)["error"]) == (400, f"{name} is not a number")


def test_a_url_with_a_trailing_slash_is_not_redirected(asked):
    assert asked("/api/about/")[0] == 404


def test_a_dataset_removed_while_it_is_viewed_is_one_error_line(tmp_path):
    shown = make(tmp_path, [line("q", "a")])
    with viewer(shown.path, tmp_path) as url:
        shutil.rmtree(shown.path)
        with pytest.raises(HTTPError) as refused:
            urlopen(f"{url}api/train/episode/0")
        error = json.loads(refused.value.read())["error"]
        assert refused.value.code in (400, 500)
        assert str(shown.path) in error and "\n" not in error and "Traceback" not in error


@pytest.mark.parametrize(
    "path", ["/page/../server.py", "/page/..%2fserver.py", "/page/%2e%2e/viewer.py", "//etc/passwd"]
)
def test_no_file_but_the_page_is_served(asked, path):
    assert asked(path)[0] == 404


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/api/train/episode/30", "no episode 30 in train"),
        ("/api/none/episodes", "has no split none"),
        ("/api/train/episodes?least=many", "least is not a number"),
        ("/api/train/episodes?share_from=nan", "not a number"),
        ("/api/train/episodes?role=bot", "unknown role"),
        ("/api/train/episode/0/token/999", "no token 999"),
        ("/api/train/episode/0/record/7", "no segment 7"),
        ("/api/audit/0", "no audit log 0"),
        ("/api/train/order?seed=-1", "seed is -1"),
        ("/api/train/order?epoch=99999999999", "epoch"),
    ],
)
def test_an_invalid_request_is_one_error_line(asked, path, words):
    status, _, body = asked(path)
    error = json.loads(body)["error"]
    assert status == 400
    assert words in error and "\n" not in error


def test_consecutive_pages_cover_the_whole_list(asked):
    numbers, start = [], 0
    while start is not None:
        page = json.loads(asked(f"/api/train/episodes?start={start}&limit=7")[2])
        numbers += [each["episode"] for each in page["episodes"]]
        start = page["next"]
    assert numbers == list(range(30))


def test_a_limit_beyond_the_last_episode_returns_all_episodes(asked):
    page = json.loads(asked("/api/train/episodes?limit=100000")[2])
    assert len(page["episodes"]) == 30
    assert page["next"] is None
