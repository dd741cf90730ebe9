from __future__ import annotations

import socket
from pathlib import Path

from tests.cli.command import assert_refused, run_jaxserve


def test_a_port_in_use_is_one_line_before_the_model_is_looked_at(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert_refused(run_jaxserve("serve", "--model", tmp_path / "missing", "--port", port), f"port {port}")


def test_bad_options_are_one_line(tmp_path: Path) -> None:
    for arguments, mention in (
        (("--port", "70000"), "--port"),
        (("--api-key", ""), "--api-key"),
        (("--max-num-seqs", "0"), "--max-num-seqs"),
        (("--dtype", "int4"), "--dtype"),
        (("--port", "0"), "missing"),
    ):
        assert_refused(run_jaxserve("serve", "--model", tmp_path / "missing", *arguments), mention)
