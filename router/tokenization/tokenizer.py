"""Tokenizer and chat template of a model, unpacked from the archive that its engine names by digest."""

import copy
import datetime
import io
import itertools
import json
import logging
import zipfile
from array import array
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.parser
import msgspec
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from fleet.completions import ApiError
from router.tokenization.pretokenizer_proof import byte_sizes, first_wrong, leaves_unchanged, why_not
from router.tokenization.segment_cache import Cutter, SegmentCache, Segments
from router.tokenization.token_lengths import longest_token
from router.tokenization.word_cache import WordEncoder

log = logging.getLogger(__name__)

LARGEST_FILE = 64 * 1024 * 1024
"""Most bytes of one unpacked file. Larger files are refused before they are unpacked."""
_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_PROBED_TOKENS = 12
"""Special tokens with which a vocabulary is probed. More of one kind behave alike."""
_PROBES = (
    "",
    " ",
    "\n",
    "\n\n",
    "a",
    " a",
    "a ",
    "A\tb",
    "'s",
    "12345",
    "é",
    "e\u0301",
    "\u200d",
    "\u2581",
    "漢字",
    "🐣",
    "<|",
    "\x00",
    "  two  words  ",
)
"""Text before and after a special token in probes: cases that normalizers and pre-tokenizers treat in special
ways.
"""
_owners = itertools.count()


class BadTokenizer(Exception):
    """Archive without a usable tokenizer. The text gives the reason."""


class _RenderedByAssistant(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words in some templates. Its body is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012 jinja2's own form

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse_rendering(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, indent: int | None = None) -> str:
    """Serialize as transformers does, since models are trained with exactly these spaces."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _today(form: str) -> str:
    return datetime.datetime.now(tz=datetime.UTC).strftime(form)


def _environment() -> ImmutableSandboxedEnvironment:
    """Return the environment that chat templates expect: whitespace as in transformers, no access to
    Python."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_RenderedByAssistant, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse_rendering
    environment.globals["strftime_now"] = _today
    return environment


class ModelTokenizer:
    """One model's tokenizer. Reading an archive takes up to a second for large vocabularies, so do it off the
    event loop.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        settings: Mapping[str, Any],
        template: str | None,
        seen: SegmentCache | None = None,
    ) -> None:
        """`seen` caches the ids of segments; None: no cache. BadTokenizer if the chat template cannot be
        compiled.
        """
        self._tokenizer = tokenizer
        self._special = {
            name: _token_text(settings.get(name)) for name in _SPECIAL if settings.get(name) is not None
        }
        self.vocabulary = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        """ids are below this number"""
        self._longest = longest_token(tokenizer)
        self._adds_special = settings.get("add_bos_token") is not False
        self._bos = (
            self._tokenizer.token_to_id(self._special["bos_token"])
            if settings.get("add_bos_token") and "bos_token" in self._special
            else None
        )
        self._owner = next(_owners)
        self._seen = seen
        self._scope = ""
        self._cutter = None if seen is None else self._prove_cutter()
        self._words = None if seen is None else self._prove_words(seen)
        self.reads_parts = template is not None and _loops_over_contents(template)
        """the chat template reads the content of a message as a list of parts"""
        try:
            self._template = None if template is None else _environment().from_string(template)
            if self._template is not None:
                # Copied once per rendering, which is faster for a plain dictionary.
                self._template.globals = dict(self._template.globals)
        except jinja2.TemplateError as error:
            raise BadTokenizer(f"the chat template cannot be compiled: {error}") from error

    @classmethod
    def from_archive(cls, archive: bytes, seen: SegmentCache | None = None) -> "ModelTokenizer":
        """Read a zip of tokenizer.json, tokenizer_config.json and, if the template is a separate file,
        chat_template.jinja. BadTokenizer otherwise.
        """
        try:
            with zipfile.ZipFile(io.BytesIO(archive)) as files:
                found = {name: _unpacked(files, name) for name in _FILES if name in files.namelist()}
        except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as error:
            raise BadTokenizer(f"not a readable zip archive: {error}") from error
        if "tokenizer.json" not in found:
            raise BadTokenizer("the archive has no tokenizer.json at its top")
        try:
            settings = msgspec.json.decode(found.get("tokenizer_config.json", b"{}"), type=dict[str, Any])
            tokenizer = Tokenizer.from_buffer(found["tokenizer.json"])
        except Exception as error:  # the tokenizers library raises bare Exception for a bad file
            raise BadTokenizer(f"tokenizer.json or tokenizer_config.json cannot be read: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        apart = found.get("chat_template.jinja")
        return cls(
            tokenizer,
            settings,
            _template_text(settings.get("chat_template")) if apart is None else apart.decode(),
            seen,
        )

    def render(
        self,
        messages: list[dict[str, Any]],
        extra: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the prompt of a conversation, ready for the assistant's answer unless that is not asked for.
        ApiError 400 if the template refuses it or is missing.
        """
        if self._template is None:
            raise ApiError(
                400,
                "this model has no chat template; send a prompt to /v1/completions",
                param="messages",
                code="no_chat_template",
            )
        try:
            values = {
                **self._special,
                "tools": None,
                "documents": None,
                **(extra or {}),
                "messages": messages,
                "add_generation_prompt": add_generation_prompt,
            }
            return self._template.render(values)
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            LookupError,
            ArithmeticError,
            AttributeError,
            RecursionError,
        ) as error:
            raise ApiError(
                400,
                f"messages do not fit the model's chat template: {error}",
                param="messages",
                code="template_error",
            ) from error

    def within(self, scope: str) -> "ModelTokenizer":
        """Return a copy that reuses ids of known texts only within this scope; "" is the scope of all callers
        without one. Otherwise the time of an answer would reveal to one tenant which texts another sent.
        Single words are shared by all scopes.
        """
        if scope == self._scope:
            return self
        scoped = copy.copy(self)
        scoped._scope = scope
        return scoped

    def segments(self, rendered: str) -> Segments:
        """Cut a rendered conversation into segments, with the known ids. Fast compared with encoding it."""
        if self._cutter is None or self._seen is None:
            return Segments([rendered], [None])
        return self._seen.look_up(self._owner, self._cutter.cut(rendered), self._scope)

    def encode_segments(self, segments: Segments) -> list[int]:
        """Return the ids of a rendered conversation. No special tokens are added, since the template has
        written its own. Thread-safe.
        """
        ids: list[int] = []
        made: list[tuple[str, array[int]]] = []
        unknown = encoded = 0
        for text, known in zip(segments.texts, segments.ids, strict=True):
            if known is None:
                new, characters = self._by_words(text)
                unknown, encoded = unknown + len(text), encoded + characters
                made.append((text, array("I", new)))
                ids += new
            else:
                ids += known
        if made and self._seen is not None and (self.reuses_segments or self.reuses_words):
            self._seen.count(unknown - encoded, encoded)
            self._seen.keep(self._owner, made if self.reuses_segments else (), self._scope)
        return ids

    def _by_words(self, text: str) -> tuple[list[int], int]:
        """Return the ids of a segment, and the number of characters that had to be encoded."""
        return (self._ids(text, special=False), len(text)) if self._words is None else self._words.ids(text)

    def encode_rendered(self, text: str) -> list[int]:
        """Return the ids of a rendered conversation, like `encode_segments`."""
        return self.encode_segments(self.segments(text))

    @property
    def reuses_segments(self) -> bool:
        return self._cutter is not None

    @property
    def reuses_words(self) -> bool:
        return self._words is not None

    def forget_segments(self) -> None:
        """Drop the cached ids of this vocabulary, which is no longer used."""
        if self._seen is not None:
            self._seen.forget(self._owner)

    def _prove_cutter(self) -> Cutter | None:
        """Return a cutter that changes no id of this vocabulary. If there is none, log the reason and return
        None.
        """
        found, reason = _plain_tokens(self._tokenizer)
        cut_at = [token for token, special in found.items() if special]
        if reason is None and not cut_at:
            reason = "it has no special token that is found before texts are normalised"
        if reason is None:
            cutter = Cutter(found, cut_at)
            wrong = first_difference(
                lambda text: self._ids(text, special=False), cutter, cut_at[:_PROBED_TOKENS]
            )
            if wrong is None:
                return cutter
            reason = f"{wrong!r} has other ids in pieces than as a whole"
        log.info("token ids of seen messages cannot be reused with this tokenizer: %s", reason)
        return None

    def _prove_words(self, seen: SegmentCache) -> WordEncoder | None:
        """Return a word encoder that changes no id of this vocabulary. If there is none, log the reason and
        return None.
        """
        reason = why_not(self._tokenizer)
        if reason is None:
            encode, sizes, unchanged = (
                partial(self._ids, special=False),
                byte_sizes(self._tokenizer),
                leaves_unchanged(self._tokenizer),
            )
            wrong = first_wrong(encode, sizes, unchanged)
            if wrong is None:
                return WordEncoder(encode, sizes, unchanged, seen.words, self._owner)
            reason = f"{wrong!r} has other ids by words than as a whole"
        log.info("token ids of seen words cannot be reused with this tokenizer: %s", reason)
        return None

    def encode_bare(self, text: str) -> list[int]:
        """Return the ids of a text, without any special token."""
        return self._ids(text, special=False)

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of a bare prompt, with the beginning-of-text token if the model expects one."""
        ids = self._ids(text, special=self._adds_special)
        if self._bos is not None and ids[:1] != [self._bos]:
            ids.insert(0, self._bos)
        return ids

    def _ids(self, text: str, *, special: bool) -> list[int]:
        """Encode by the call without offsets, which takes half the time of `encode` for the same ids."""
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids
        return ids

    def min_tokens(self, text: str) -> int:
        """Return a lower bound on the tokens of a text, in negligible time. 0 if the tokenizer allows no
        bound.
        """
        return 0 if self._longest is None else -(-len(text.encode("utf-8", "surrogatepass")) // self._longest)

    def decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


def _plain_tokens(tokenizer: Tokenizer) -> tuple[dict[str, bool], str | None]:
    """Return the added tokens that are found in raw text, with True for special ones; or the reason why some
    depend on their context.
    """
    if getattr(tokenizer.model, "dropout", None):
        return {}, "its ids are drawn by chance (dropout)"
    raw = [
        token
        for token in tokenizer.get_added_tokens_decoder().values()
        if not token.normalized and token.content
    ]
    odd = next((token for token in raw if token.lstrip or token.rstrip or token.single_word), None)
    if odd is not None:
        return {}, f"its token {odd.content!r} takes the spaces around it or depends on them"
    return {token.content: bool(token.special) for token in raw}, None


def first_difference(encode: Callable[[str], list[int]], cutter: Cutter, tokens: list[str]) -> str | None:
    """Return a probe whose ids differ if it is encoded in segments; None without such a probe."""
    for text in _probes(tokens):
        pieced = [one for piece in cutter.cut(text) for one in encode(piece)]
        if pieced != encode(text):
            return text
    return None


def _probes(tokens: list[str]) -> Iterator[str]:
    """Yield every token between every two snippets, and every two tokens in a row."""
    for token in tokens:
        for before, behind in itertools.product(_PROBES, repeat=2):
            yield f"{before}{token}{behind}"
    for one, other in itertools.product(tokens, repeat=2):
        yield f"a {one}{other} b{one} c"


def _loops_over_contents(template: str) -> bool:
    """Return True if a template has a loop over the content of a message: it then expects a list of parts, as
    vLLM concludes. A template that cannot be parsed has none.
    """
    try:
        parsed = _environment().parse(template)
    except jinja2.TemplateError:
        return False
    return any(_names_content(loop.iter) for loop in parsed.find_all(jinja2.nodes.For))


def _names_content(node: jinja2.nodes.Node | None) -> bool:
    """Return True for `content`, `message.content` and `message['content']`, filtered, tested or sliced."""
    while isinstance(node, jinja2.nodes.Filter | jinja2.nodes.Test) or (
        isinstance(node, jinja2.nodes.Getitem) and isinstance(node.arg, jinja2.nodes.Slice)
    ):
        node = node.node
    match node:
        case jinja2.nodes.Name(name=name):
            return bool(name == "content")
        case jinja2.nodes.Getattr(attr=name):
            return bool(name == "content")
        case jinja2.nodes.Getitem(arg=jinja2.nodes.Const(value=name)):
            return bool(name == "content")
    return False


def _unpacked(files: zipfile.ZipFile, name: str) -> bytes:
    size = files.getinfo(name).file_size
    if size > LARGEST_FILE:
        raise BadTokenizer(f"{name} has {size} bytes; at most {LARGEST_FILE} are unpacked")
    return files.read(name)


def _token_text(token: Any) -> str:
    return str(token.get("content", "")) if isinstance(token, dict) else str(token)


def _template_text(template: Any) -> str | None:
    """Return the template, or from a list of named ones the one named "default" (else the first)."""
    if isinstance(template, list):
        named = {
            one["name"]: one["template"]
            for one in template
            if isinstance(one, dict) and "template" in one and "name" in one
        }
        template = named.get("default", next(iter(named.values()), None))
    return template if isinstance(template, str) else None
