"""The loss scale grows after good steps and shrinks after bad ones."""

from infinity.optim.rules import LossScaler


def test_it_doubles_after_an_interval_of_good_steps():
    scaler = LossScaler(8.0, interval=3)
    for _ in range(3):
        assert scaler.scale == 8.0
        scaler.update(found_inf=False)
    assert scaler.scale == 16.0


def test_an_overflow_halves_it_and_starts_the_interval_again():
    scaler = LossScaler(8.0, interval=2)
    for found_inf in (False, True, False):
        scaler.update(found_inf)
    assert scaler.scale == 4.0
    scaler.update(found_inf=False)
    assert scaler.scale == 8.0


def test_it_never_grows_to_infinity():
    scaler = LossScaler(2.0**1023, interval=1)
    scaler.update(found_inf=False)
    assert scaler.scale == 2.0**1023


def test_it_goes_on_from_its_state():
    scaler, other = LossScaler(8.0, interval=3), LossScaler(1.0, interval=3)
    scaler.update(found_inf=False)
    other.load_state_dict(scaler.state_dict())
    for one in (scaler, other):
        one.update(found_inf=False)
        one.update(found_inf=False)
    assert scaler.scale == other.scale == 16.0
