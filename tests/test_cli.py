import pytest

from d2amp_ext import __version__, cli


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit) as done:
        cli.main(["--help"])
    assert done.value.code == 0
    text = capsys.readouterr().out
    assert all(name in text for name in cli.COMMANDS) and "d2amp demo" in text


def test_version(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert __version__ in capsys.readouterr().out


@pytest.mark.parametrize("argv", [[], ["trian"], ["train", "--no-such-flag"]])
def test_usage_errors_are_status_2(argv, capsys):
    try:
        status = cli.main(argv)
    except SystemExit as error:
        status = error.code
    assert status == 2 and "usage" in capsys.readouterr().err


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help(name, capsys):
    assert cli.main([name, "--help"]) == 0
    assert "usage: d2amp " + name in capsys.readouterr().out


def stub(monkeypatch, error):
    class Module:
        add_arguments = staticmethod(lambda parser: None)

        @staticmethod
        def run(args):
            raise error

    monkeypatch.setattr(cli.importlib, "import_module", lambda *args: Module)


@pytest.mark.parametrize(
    "error, status, text",
    [
        (cli.UserError("KEY = 1: must be 2"), 2, "error: KEY = 1: must be 2"),
        (ModuleNotFoundError("No module named 'detectron2'", name="detectron2"), 2, "d2amp setup"),
        (ModuleNotFoundError("No module named 'lightning'", name="lightning"), 2, 'pip install "d2amp-ext[lightning]"'),
        (KeyboardInterrupt(), 130, "interrupted"),
        (FloatingPointError("gave up"), 1, "error: gave up"),
    ],
)
def test_exit_statuses(monkeypatch, capsys, error, status, text):
    stub(monkeypatch, error)
    assert cli.main(["train"]) == status
    assert text in capsys.readouterr().err


def test_a_bug_is_status_1_with_its_traceback(monkeypatch, caplog):
    stub(monkeypatch, RuntimeError("a bug"))
    assert cli.main(["train"]) == 1
    assert "Traceback" in caplog.text and "a bug" in caplog.text
