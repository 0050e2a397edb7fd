"""The operator's settings: options win over the environment, and what is wrong is said in one line."""

from __future__ import annotations

import pytest

from stepfast_operator.settings import parse_settings


def test_what_is_not_given_is_off() -> None:
    settings = parse_settings([], {})
    assert (settings.namespaces, settings.storage_root, settings.namespace) == ((), "", "default")
    assert (settings.metrics_port, settings.health_port, settings.allowed_storage) == (None, None, ())


def test_options_win_over_the_environment() -> None:
    env = {
        "STEPFAST_OPERATOR_METRICS_PORT": "8080",
        "STEPFAST_OPERATOR_HEALTH_PORT": "8081",
        "STEPFAST_OPERATOR_STORAGE_ROOT": "az://root/jobs",
        "STEPFAST_OPERATOR_WATCH_NAMESPACE": "a,b,a",
        "STEPFAST_OPERATOR_SPARE_PRIORITY_CLASS": "spares",
        "STEPFAST_OPERATOR_ALLOW_STORAGE": "az://a,b/x s3://c",
        "POD_NAME": "operator-0",
        "POD_NAMESPACE": "system",
    }
    settings = parse_settings(["--metrics-port", "9090"], env)
    assert (settings.metrics_port, settings.health_port) == (9090, 8081)
    assert (settings.storage_root, settings.namespaces) == ("az://root/jobs", ("a", "b"))
    assert settings.spare_priority_class == "spares"
    assert settings.allowed_storage == ("az://a,b/x", "s3://c")
    assert (settings.identity, settings.namespace) == ("operator-0", "system")


@pytest.mark.parametrize(
    ("arguments", "env"),
    [(["--health-port", "http"], {}), ([], {"STEPFAST_OPERATOR_HEALTH_PORT": "http"})],
    ids=["option", "environment"],
)
def test_a_port_that_is_no_number_is_told(
    arguments: list[str], env: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_settings(arguments, env)
    assert ended.value.code == 2
    assert "argument --health-port: invalid int value: 'http'" in capsys.readouterr().err
