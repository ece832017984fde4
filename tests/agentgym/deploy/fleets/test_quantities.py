"""What pods ask for is added up as a quota counts it."""

import pytest

from agentgym.deploy.fleets.quantities import amount, asked, lacking


@pytest.mark.parametrize(
    ("quantity", "number"),
    [("500m", 0.5), ("2Gi", 2 * 2**30), ("64Mi", 2**26), ("3", 3.0), (4, 4.0), ("1e3", 1000.0),
     ("2k", 2000.0)],
)  # fmt: skip
def test_a_quantity_is_a_number(quantity, number):
    assert amount(quantity) == pytest.approx(number)


@pytest.mark.parametrize("text", ["", "Gi", "3x", "1.2.3.4Zi"])
def test_nonsense_is_refused(text):
    with pytest.raises(ValueError):
        amount(text)


def deployment(replicas, **requests):
    container = {"resources": {"requests": requests, "limits": {"memory": "1Gi"}}}
    return {
        "kind": "Deployment",
        "spec": {"replicas": replicas, "template": {"spec": {"containers": [container]}}},
    }


def test_a_quota_is_asked_for_all_servers_together():
    objects = [
        deployment(3, cpu="500m", memory="512Mi"),
        deployment(2, cpu="1", memory="1Gi"),
        {"kind": "Service"},
    ]
    needed = asked(objects)
    assert needed["pods"] == 5
    assert needed["requests.cpu"] == needed["cpu"] == 3.5
    assert needed["requests.memory"] == 3.5 * 2**30
    assert needed["limits.memory"] == 5 * 2**30
    assert needed["services"] == 1
    quota = {
        "metadata": {"name": "q"},
        "status": {
            "hard": {"pods": "8", "requests.cpu": "4", "requests.memory": "64Gi"},
            "used": {"pods": "4", "requests.cpu": "500m"},
        },
    }
    (line,) = lacking([quota], needed)
    assert line.startswith("quota q: pods 5 is needed, 4 of 8 is left; end what is no longer")
    assert lacking([], needed) == []
