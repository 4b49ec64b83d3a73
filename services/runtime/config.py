"""Settings: one frozen dataclass, filled from defaults < TOML file < environment `TOKENWAY_...` < flags.

The only place where the environment is read or written. An unknown name is an error wherever it comes from. The
launcher hands its children the resolved settings through the environment, so that a process can also be started alone
with the same names.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.runtime.setting_conflicts import contradiction
from services.runtime.setting_ranges import RANGES

_ENVIRONMENT_PREFIX = "TOKENWAY_"
_INSTANCE_NAME = re.compile(r"[A-Za-z0-9._-]{0,64}")  # it becomes part of a file name and of a routing id


class SettingsError(Exception):
    """A setting that cannot be used; the message names it and says what would be right."""


def setting(
    default: Any, help_text: str, choices: tuple[str, ...] = (), *, is_list: bool = False, is_secret: bool = False
) -> Any:
    """A field of Settings.

    Args:
        default: Its value when nobody sets it.
        help_text: Its line of help.
        choices: The values it may take; empty for any.
        is_list: Several values, joined by commas; the flag may be repeated, in TOML it may be a list.
        is_secret: Never shown in a message or in the settings' own text.
    """
    metadata = {"help": help_text, "choices": choices, "is_list": is_list, "is_secret": is_secret}
    return dataclasses.field(default=default, repr=not is_secret, metadata=metadata)


@dataclass(frozen=True)
class Settings:
    """Everything one can set. Names are flags (`--page-size`), TOML keys and variables (`TOKENWAY_PAGE_SIZE`)."""

    # the model
    model: str = setting("smollm2:135m", "model folder, GGUF file, hub name or alias")
    served_model_name: str = setting("", "name in /v1/models and answers (default: the model's own)")
    device: str = setting("auto", "where the model runs", ("auto", "cpu", "cuda"))
    dtype: str = setting("auto", "weights and activations; auto: float32 on cpu, the checkpoint's on cuda",
                         ("auto", "float32", "bfloat16", "float16"))  # fmt: skip
    load_format: str = setting("auto", "dummy: random weights, to measure without a checkpoint", ("auto", "dummy"))
    numerics: str = setting("fast", "exact: float32, the same tokens alone and in a batch; fast: what runs fastest",
                            ("exact", "fast"))  # fmt: skip
    quantization: str = setting("none", "rounds weights: fp8 on CUDA; int8 or int4 (by 32 of a row) on a CPU",
                                ("none", "fp8", "int8", "int4"))  # fmt: skip
    cpu_copies_gb: float = setting(4.0, "most memory for second forms of 4-bit matrices, for many rows, on a CPU")
    max_model_len: int = setting(0, "most tokens of prompt + answer (0: the model's context)")
    chat_template: str = setting("", "file with a chat template that replaces the model's own")
    tool_call_parser: str = setting("auto", "how the model writes tool calls; auto: as its chat template says",
                                    ("auto", "none", "hermes", "qwen25", "qwen", "llama3_json", "llama3", "mistral",
                                     "pythonic", "llama4_pythonic"))  # fmt: skip
    reasoning_parser: str = setting("auto", "how the model marks its thoughts; auto: as its chat template says",
                                    ("auto", "none", "qwen3", "qwen3-thinking", "deepseek_r1",
                                     "deepseek-r1"))  # fmt: skip
    generation_config: str = setting("auto", "sampling defaults from generation_config.json", ("auto", "none"))
    models_dir: str = setting("", "where models fetched by name are kept (default: in the user's cache)")
    # HTTP
    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(8000, "port to listen on")
    strict_fields: bool = setting(False, "answer 400 to unknown request fields instead of naming them in a header")
    max_body_bytes: int = setting(16 * 1024 * 1024, "largest request body")
    max_choices: int = setting(8, "largest n")
    max_prompts: int = setting(1024, "most prompts in one completion request")
    max_messages: int = setting(4096, "most messages in one chat request")
    max_stop_strings: int = setting(16, "most stop strings of a request")
    max_stop_bytes: int = setting(1024, "longest stop string, in bytes of UTF-8")
    max_logprobs: int = setting(20, "largest top_logprobs, logprobs and prompt_logprobs")
    max_logit_bias: int = setting(1024, "most entries of logit_bias")
    max_headers: int = setting(64, "most headers of a request")
    max_header_bytes: int = setting(8 * 1024, "longest header line and request line")
    max_head_bytes: int = setting(32 * 1024, "most bytes of all headers of a request together")
    max_connections: int = setting(0, "most open connections of a tokenizer process (0: no limit)")
    max_connections_per_address: int = setting(0, "most open connections from one address (0: no limit)")
    head_timeout_s: float = setting(10.0, "how long a request head may take to arrive")
    body_timeout_s: float = setting(30.0, "how long a whole request may take to arrive")
    write_timeout_s: float = setting(60.0, "how long a stream may go without its client reading a byte")
    # keys, control, encryption
    api_key: str = setting(
        "", "key that clients must send (several: repeat it, or commas)", is_list=True, is_secret=True
    )
    api_key_file: str = setting("", "file with keys that clients must send, one a line")
    admin_key: str = setting("", "key for the control routes", is_secret=True)
    admin_key_file: str = setting("", "file whose first line is the key for the control routes")
    admin_on_public: bool = setting(False, "answer control routes on the public port too, with the admin key")
    control_port: int = setting(0, "port on 127.0.0.1 for control routes, with the admin key (0: Unix socket alone)")
    metrics_open: bool = setting(False, "answer /metrics without a key")
    max_requests_per_key: int = setting(0, "most requests of one key being answered; beyond it 429 (0: no limit)")
    max_tokens_per_minute: int = setting(0, "most prompt and answer tokens of one key in a minute (0: no limit)")
    isolate_cache_by_key: bool = setting(False, "share no cached prefix between keys")
    cors_origins: str = setting(
        "", "origins of web pages that may ask, or * (several: repeat it, or commas)", is_list=True
    )
    tls_cert: str = setting("", "PEM file with the certificate chain for HTTPS")
    tls_key: str = setting("", "PEM file with the certificate's key")
    # the group
    num_tokenizers: int = setting(1, "tokenizer processes, all on one port")
    num_detokenizers: int = setting(1, "detokenizer processes")
    dp_size: int = setting(1, "worker processes of this host, each with the whole model")
    dp_rank: int = setting(0, "which of these a worker is: its CUDA device, its share of cores and memory")
    tp_size: int = setting(0, "processes that share one model (0: as many as torchrun has started, else one)")
    scheduler_endpoint: str = setting(
        "", "ipc://PATH or tcp://HOST:PORT of the scheduler (default: in the run directory)"
    )
    run_dir: str = setting("", "private directory for sockets (default: a new one for each run)")
    instance: str = setting("", "name of this process among its role (default: random)")
    drain_timeout_s: float = setting(30.0, "how long a stopping process lets its requests finish")
    # scheduling
    routing: str = setting(
        "prefix", "which worker gets a request: where its prefix is, or each in turn", ("prefix", "round_robin")
    )
    page_size: int = setting(16, "tokens of a KV page")
    enable_prefix_caching: bool = setting(True, "reuse the KV pages of prompts and answers that share a prefix")
    kv_cache_tokens: int = setting(0, "tokens of the KV pool (0: what memory allows)")
    mem_fraction_static: float = setting(0.85, "share of the device's memory for weights and KV pool")
    max_running_requests: int = setting(256, "most requests in a step")
    max_queued_requests: int = setting(1024, "most requests waiting; beyond it 503")
    max_num_batched_tokens: int = setting(0, "most tokens of a step (0: the chunk size + max_running_requests)")
    chunked_prefill_size: int = setting(0, "most prompt tokens of a step (0: measured at start, -1: whole prompts)")
    plans_ahead: int = setting(1, "steps planned before the result of the last is known, 0 to 4")
    speculation: str = setting(
        "off", "guess next tokens from those before and verify several at once", ("off", "ngram")
    )
    speculation_tokens: int = setting(8, "most tokens guessed at a time")
    speculation_min_match: int = setting(3, "tokens that must have come before, in the same order, for a guess")
    speculation_step_tokens: int = setting(32, "most decoded and guessed tokens of a step; half as many requests guess")
    # structured output
    max_schema_bytes: int = setting(256 * 1024, "largest JSON schema or grammar of a request")
    max_schema_properties: int = setting(5000, "most properties in a JSON schema")
    max_schema_depth: int = setting(32, "how deep schemas may lie within schemas")
    json_whitespace: str = setting(
        "compact", "blanks in answers held to a JSON schema: none, or where JSON allows them", ("compact", "flexible")
    )
    grammar_timeout_s: float = setting(2.0, "how long compiling a grammar may take")
    grammar_memory_mb: int = setting(512, "how much memory compiling a grammar may take, in MiB")
    jump_ahead: bool = setting(True, "take tokens that a grammar forces without running the model for each")
    # the worker
    attention_backend: str = setting("auto", "attention implementation; auto: the fastest there is",
                                     ("auto", "reference", "paged", "triton", "varlen", "flashinfer"))  # fmt: skip
    kv_cache_dtype: str = setting("auto", "element type of the KV pool; auto: the model's, on a CPU float16; fp8: e4m3",
                                  ("auto", "float32", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"))  # fmt: skip
    cuda_graphs: bool = setting(True, "replay recorded decode steps on CUDA instead of launching them")
    num_threads: int = setting(0, "threads of the worker's CPU kernels (0: one for each core)")
    # logs
    log_level: str = setting("info", "least severe level to log", ("debug", "info", "warning", "error"))
    log_format: str = setting("text", "form of log lines", ("text", "json"))
    log_requests: bool = setting(False, "a line at info for each request that ends (without it at debug)")
    # watching
    metric_names: str = setting(
        "tokenway", "vllm: the names of vLLM too, for dashboards made for it", ("tokenway", "vllm")
    )
    otlp_endpoint: str = setting("", "where spans of requests are sent: http://HOST:4318 of an OpenTelemetry collector")
    trace_ring: int = setting(1024, "ended requests that a tokenizer process keeps for /trace")

    def __post_init__(self) -> None:
        """Refuses values out of range and settings that contradict each other; SettingsError names them."""
        for name, low, high in RANGES:
            value = getattr(self, name)
            if not low <= value <= high:
                raise SettingsError(f"{_flag(name)} must be between {low} and {high}, not {value}")
        for field in dataclasses.fields(self):
            choices = field.metadata["choices"]
            if choices and getattr(self, field.name) not in choices:
                raise SettingsError(f"{_flag(field.name)} must be one of {', '.join(choices)}")
        if not self.model.strip():
            raise SettingsError("--model must not be empty: a folder, a GGUF file, an alias or a hub name")
        if not _INSTANCE_NAME.fullmatch(self.instance):
            raise SettingsError(f"--instance must be at most 64 letters, digits, `._-`, not {self.instance!r}")
        if problem := contradiction(self):
            raise SettingsError(problem)

    def without_secrets(self) -> Settings:
        """The same settings for a process that has no use for keys."""
        return dataclasses.replace(self, api_key="", admin_key="")

    def as_environment(self) -> dict[str, str]:
        """The variables that give another process these settings (those that differ from the defaults)."""
        return {
            _ENVIRONMENT_PREFIX + field.name.upper(): str(getattr(self, field.name)).lower()
            if isinstance(getattr(self, field.name), bool)
            else str(getattr(self, field.name))
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }


SECRETS = tuple(field.name for field in dataclasses.fields(Settings) if field.metadata["is_secret"])
"""Settings that only the tokenizers are handed, and nobody is shown."""


def values_of(joined: str) -> list[str]:
    """The values of a setting that holds several, joined by commas."""
    return [value.strip() for value in joined.split(",") if value.strip()]


def user_directory(variable: str, fallback: Path) -> Path:
    """A directory that the desktop conventions name in an XDG variable (`XDG_CACHE_HOME`), or the fallback."""
    path = Path(os.environ.get(variable, ""))
    return path if path.is_absolute() else fallback


def client_api_key() -> str:
    """The key that a command sends to a server, from the variable that OpenAI's own clients read; "" without one."""
    return os.environ.get("OPENAI_API_KEY", "")


def wants_no_color() -> bool:
    """Whether the person asked every program for output without colours (https://no-color.org)."""
    return bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"


def variables(*names: str) -> dict[str, str]:
    """Those of these variables that are set and not empty: what other programs tell this process, or its libraries."""
    return {name: os.environ[name] for name in names if os.environ.get(name)}


def set_library_variable(name: str, value: str) -> None:
    """Sets a variable that a library of this process looks at, where the library can be told in no other way."""
    os.environ[name] = value


def inherited_environment() -> dict[str, str]:
    """The environment for a child, without our own settings."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_ENVIRONMENT_PREFIX)}


def load_settings(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> Settings:
    """The settings of a process.

    Args:
        arguments: the command line after the program name; a first word without dashes is the model.
        environment: variables to read; the process's own when None.

    Raises:
        SettingsError: an unknown name, a value of the wrong type, or one outside its range. Names it.
    """
    environment = os.environ if environment is None else environment
    from_flags = _parse_flags(arguments)
    config_file = from_flags.pop("config", None)
    values = _from_toml(Path(config_file)) if config_file else {}
    values |= _from_environment(environment)
    values |= from_flags
    return Settings(**{name: _convert(name, value) for name, value in values.items()})


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for every setting, and `--config FILE`."""
    parser.add_argument("model_argument", nargs="?", metavar="MODEL", help="the same as --model")
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings")
    for field in dataclasses.fields(Settings):
        default = "" if field.default == "" else f" (default {field.default})"
        options: dict[str, Any] = {"dest": field.name, "help": field.metadata["help"] + default, "default": None}
        if field.type == "bool":
            parser.add_argument(_flag(field.name), action=argparse.BooleanOptionalAction, **options)
        else:
            if field.metadata["is_list"]:
                options["action"] = "append"
            parser.add_argument(_flag(field.name), metavar=field.name.rsplit("_", 1)[-1].upper(), **options)


def _parse_flags(arguments: Sequence[str]) -> dict[str, Any]:
    parser = FlagParser(add_help=False, allow_abbrev=False)
    add_flags(parser)
    found = {name: value for name, value in vars(parser.parse_args(arguments)).items() if value is not None}
    found = {name: ",".join(value) if isinstance(value, list) else value for name, value in found.items()}
    if "model_argument" in found:
        if "model" in found:
            raise SettingsError(f"the model is given twice: {found['model_argument']!r} and --model {found['model']!r}")
        found["model"] = found.pop("model_argument")
    return found


class FlagParser(argparse.ArgumentParser):
    """A parser of flags that says in one line what is wrong with them, as SettingsError."""

    def error(self, message: str) -> typing.NoReturn:
        raise SettingsError(message)


def _from_toml(path: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"cannot read settings from {path}: {error}") from error
    values = {name.replace("-", "_"): value for name, value in values.items()}
    _refuse_unknown(values, str(path))
    return {name: _joined(name, value) for name, value in values.items()}


def _joined(name: str, value: Any) -> Any:
    """A list of texts as the one text that a setting of several values is."""
    (field,) = (field for field in dataclasses.fields(Settings) if field.name == name)
    is_list = field.metadata["is_list"] and isinstance(value, list) and all(isinstance(item, str) for item in value)
    return ",".join(value) if is_list else value


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    values = {
        name.removeprefix(_ENVIRONMENT_PREFIX).lower(): value
        for name, value in environment.items()
        if name.startswith(_ENVIRONMENT_PREFIX)
    }
    _refuse_unknown(values, "the environment")
    return values


def _refuse_unknown(values: Mapping[str, Any], source: str) -> None:
    known = {field.name for field in dataclasses.fields(Settings)}
    for name in values:
        if name not in known:
            raise SettingsError(f"unknown setting {name!r} in {source}")


_TYPE_NAMES = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


def _convert(name: str, value: Any) -> Any:
    hint = typing.get_type_hints(Settings)[name]
    shown = "what was given" if name in SECRETS else repr(value)
    if isinstance(hint, types.UnionType) or hint not in (str, int, float, bool):
        raise TypeError(f"setting {name} has an unsupported type")
    if hint is bool and isinstance(value, str):
        if value.lower() not in ("true", "false", "1", "0", "yes", "no"):
            raise SettingsError(f"{_flag(name)} must be {_TYPE_NAMES[bool]}, not {shown}")
        return value.lower() in ("true", "1", "yes")
    if isinstance(value, bool) is not (hint is bool) or (hint is str and not isinstance(value, str)):
        raise SettingsError(f"{_flag(name)} must be {_TYPE_NAMES[hint]}, not {shown}")
    try:
        converted = hint(value)
    except (TypeError, ValueError, OverflowError):
        raise SettingsError(f"{_flag(name)} must be {_TYPE_NAMES[hint]}, not {shown}") from None
    if isinstance(value, float) and hint is int and converted != value:
        raise SettingsError(f"{_flag(name)} must be {_TYPE_NAMES[int]}, not {shown}")
    return converted


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
