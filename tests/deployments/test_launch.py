import socket

import pytest

from deployments.launch import Address, find_problem, read_address


def test_the_address_is_the_configs(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text("http_options: {host: 127.0.0.2, port: 8123}\n")
    assert read_address(config) == Address("127.0.0.2", 8123)
    config.write_text("applications: []\n")
    assert read_address(config) == Address("127.0.0.1", 8000)


def test_a_missing_config_is_an_error_with_its_name(tmp_path):
    with pytest.raises(OSError, match=r"nope\.yaml"):
        read_address(tmp_path / "nope.yaml")


def test_a_taken_port_is_told_before_anything_starts():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        address = Address("127.0.0.1", holder.getsockname()[1])
        assert str(address.port) in find_problem(address)
    assert find_problem(address) is None
