"""Who waits longest weighs most."""

import time
from unittest import mock

from tideline_airflow.first_come import FirstCome

NOW = 1_800_000_000.0


def weight_at(moment: float) -> int:
    with mock.patch.object(time, "time", return_value=moment):
        return FirstCome().get_weight(None)


def test_the_earlier_weighs_more():
    assert weight_at(NOW) > weight_at(NOW + 1)


def test_it_fits_into_airflows_column_for_a_while():
    long_from_now = NOW + 60 * 365 * 86_400
    assert -(2**31) <= weight_at(long_from_now) < weight_at(NOW) < 2**31
