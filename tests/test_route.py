"""Where an actor joins next, after it was sent somewhere or came to nothing there."""

from envs_server.route import Route
from seedrl.config import SecurityConfig
from seedrl.wire.messages import MAX_REDIRECTS

HOME, THERE, ELSEWHERE = "127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"


def make_route() -> Route:
    return Route(HOME, SecurityConfig())


def test_follow_counts_until_somebody_serves_the_actor() -> None:
    route = make_route()
    assert (route.link.address, route.redirects) == (HOME, 0)
    assert route.follow(THERE) == ""
    assert (route.link.address, route.redirects, route.is_home) == (THERE, 1, False)
    assert route.follow(ELSEWHERE) == ""
    assert (route.link.address, route.redirects) == (ELSEWHERE, 2)
    route.served()
    assert (route.link.address, route.redirects) == (ELSEWHERE, 0)
    route.go_home()
    assert (route.link.address, route.redirects, route.is_home) == (HOME, 0, True)


def test_redirect_that_leads_nowhere_counts_at_home_until_that_comes_to_nothing_as_well() -> None:
    route = make_route()
    route.follow(THERE)
    route.go_home()
    assert (route.link.address, route.redirects) == (HOME, 1)  # so that it is served here if that can be
    route.go_home()
    assert route.redirects == 0


def test_follow_beyond_the_limit_leads_home_and_begins_anew() -> None:
    route = make_route()
    for _ in range(MAX_REDIRECTS):
        assert route.follow(THERE) == ""
    assert f"sends it on to {ELSEWHERE}" in route.follow(ELSEWHERE)
    assert (route.link.address, route.redirects) == (HOME, 0)


def test_follow_to_where_it_may_not_go_leads_home_which_is_to_serve_it() -> None:
    route = make_route()
    route.follow(THERE)
    words = route.follow("10.0.0.1:50051")
    assert words.startswith(f"the learner at {THERE} sends it to 10.0.0.1:50051, where it may not go: ")
    assert (route.link.address, route.redirects) == (HOME, MAX_REDIRECTS)


def test_redirect_to_where_it_was_started_is_home() -> None:
    route = make_route()
    route.follow(THERE)
    assert route.follow(HOME) == ""
    assert route.is_home


def test_stay_is_not_sent_elsewhere() -> None:
    route = make_route()
    route.stay()
    assert (route.link.address, route.redirects) == (HOME, 1)
