"""The demo model: it loads everywhere unchanged, its data is what its manifest says, its routings are its
own."""

import hashlib
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2.sandbox
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from benchmarks.demo_model import DOMAINS, heldout_path, routings_path
from deploy.demo_model import CONTEXT_LENGTH, checkpoint_path

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from benchmarks.demo_model import corpus, heldout  # noqa: E402  (they need no torch, but the rest below does)
from benchmarks.demo_model.architecture import load_model, router_outputs, write_checkpoint  # noqa: E402
from benchmarks.demo_model.corpus import (  # noqa: E402
    CorpusError,
    Document,
    NearCopies,
    gather,
    middle,
    strip_roff,
)
from benchmarks.demo_model.evaluate import (  # noqa: E402
    control_model,
    losses_by_domain,
    losses_by_position,
    measure_skew,
)
from benchmarks.demo_model.optimiser import orthogonalise  # noqa: E402
from benchmarks.demo_model.record_routings import (  # noqa: E402
    PROMPT_TOKENS,
    REQUEST_TOKENS,
    chosen_experts,
    windows,
)
from benchmarks.demo_model.train import WINDOW, balance_loss, rate, train, window_length  # noqa: E402

TEST, FIT = "test", "fit"


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """More threads than free cores wait for each other, and add up in varying order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model() -> Any:
    return load_model(checkpoint_path())


@pytest.fixture(scope="module")
def routings() -> dict[str, npt.NDArray[Any]]:
    with np.load(routings_path(), allow_pickle=False) as file:
        return dict(file)


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    return heldout.read_documents(TEST)


# What others rest on: paths, sizes, shape


def test_asking_for_the_paths_imports_nothing_heavy() -> None:
    heavy = {"torch", "transformers", "numpy", "typer"}
    code = (
        f"import sys, benchmarks.demo_model, deploy.demo_model as m; m.checkpoint_path(); sys.exit(bool({heavy!r} &"
        " set(sys.modules)))"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False).returncode
        == 0
    )


@pytest.mark.parametrize(
    ("path", "limit"),
    [(checkpoint_path(), 12_000_000), (heldout_path(), 400_000), (routings_path(), 2_000_000)],
)
def test_what_is_committed_stays_small(path: Path, limit: int) -> None:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    assert 0 < sum(file.stat().st_size for file in files) <= limit


def test_the_checkpoint_loads_in_transformers_unchanged() -> None:
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint_path(), output_loading_info=True
    )
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    assert sum(parameter.numel() for parameter in loaded.parameters()) == 5_285_824
    assert not any(report.values())


def test_the_stated_shape_is_legal_for_four_ranks_and_replicates_kv_heads() -> None:
    config = json.loads((checkpoint_path() / "config.json").read_text("ascii"))
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (8, 2, 32)
    assert (config["num_hidden_layers"], config["num_local_experts"], config["num_experts_per_tok"]) == (
        4,
        32,
        4,
    )
    assert config["norm_topk_prob"] is True
    assert config["tie_word_embeddings"] is True


def test_every_file_states_the_same_context_length() -> None:
    stated = [
        json.loads((checkpoint_path() / name).read_text("ascii"))[key]
        for name, key in (
            ("config.json", "max_position_embeddings"),
            ("tokenizer_config.json", "model_max_length"),
        )
    ]
    assert stated == [CONTEXT_LENGTH, CONTEXT_LENGTH]
    assert f"{CONTEXT_LENGTH} tokens" in (checkpoint_path() / "README.md").read_text("utf-8")


# The tokenizer: a token is a byte


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(checkpoint_path() / "tokenizer.json"))


@given(text=st.text())
@example(text="Ā\x00Ġ\r\n \t<0x00> <|endoftext|> 日本語 Привет \U0001f600 e\u0301")
def test_any_text_becomes_its_bytes_and_comes_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text).ids
    assert ids == list(text.encode())
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@given(raw=st.binary())
def test_any_tokens_become_text_as_their_bytes_do(tokenizer: Tokenizer, raw: bytes) -> None:
    assert tokenizer.decode(list(raw), skip_special_tokens=False).count("\ufffd") == raw.decode(
        "utf-8", "replace"
    ).count("\ufffd")


def test_transformers_reads_the_same_tokenizer_with_byte_zero_as_its_end() -> None:
    loaded = transformers.AutoTokenizer.from_pretrained(checkpoint_path())
    text = "Ā\x00 def f(x):\n\treturn 'é日'"
    assert loaded(text)["input_ids"] == list(text.encode())
    assert loaded.decode(list(text.encode())) == text
    assert (loaded.eos_token_id, len(loaded)) == (0, 256)


def test_the_chat_template_is_ascii_and_opens_the_reply_only_when_asked() -> None:
    template = json.loads((checkpoint_path() / "tokenizer_config.json").read_text("ascii"))["chat_template"]
    render = jinja2.sandbox.ImmutableSandboxedEnvironment().from_string(template).render
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hello?"}]},
    ]
    assert template.isascii()
    assert render(messages=messages) == "system: Be brief.\nuser: Hello?\n"
    assert (
        render(messages=messages, add_generation_prompt=True)
        == "system: Be brief.\nuser: Hello?\nassistant: "
    )


# The held-out documents


def test_the_manifest_lists_every_file_and_nothing_else() -> None:
    listed = {entry["file"]: entry for entry in heldout.read_manifest() if entry["part"] == TEST}
    found = {
        str(file.relative_to(heldout_path()))
        for domain in DOMAINS
        for file in (heldout_path() / domain).iterdir()
    }
    assert set(listed) == found
    for name, entry in listed.items():
        content = (heldout_path() / name).read_bytes()
        assert (entry["bytes"], entry["sha256"]) == (len(content), hashlib.sha256(content).hexdigest())
        assert content.decode("utf-8").encode() == content


def test_every_held_out_document_has_a_permissive_licence_whose_text_is_here() -> None:
    texts = {file.stem for file in (heldout_path() / "licences").iterdir()}
    for entry in heldout.read_manifest():
        assert entry["licence"] in heldout.ALLOWED_LICENCES
        assert entry["notice"] in texts
        assert entry["source"]


def test_every_domain_is_held_out() -> None:
    counts = Counter((entry["part"], entry["domain"]) for entry in heldout.read_manifest())
    assert set(counts) == {(part, domain) for part in (TEST, FIT) for domain in DOMAINS}
    assert min(counts.values()) >= 6


def test_no_document_is_in_both_halves() -> None:
    by_part = {
        part: [entry for entry in heldout.read_manifest() if entry["part"] == part] for part in (TEST, FIT)
    }
    for key in ("source", "sha256"):
        assert not {entry[key] for entry in by_part[TEST]} & {entry[key] for entry in by_part[FIT]}


# The recorded routings


def test_routings_are_well_formed(routings: dict[str, npt.NDArray[Any]]) -> None:
    requests = len(routings["tokens"])
    assert requests >= 300
    assert routings["tokens"].shape == (requests, REQUEST_TOKENS)
    assert routings["experts"].shape == (requests, REQUEST_TOKENS, 4, 4)
    assert routings["experts"].dtype == np.uint8
    assert routings["prompt"] == PROMPT_TOKENS
    assert tuple(routings["domains"]) == DOMAINS
    assert (np.diff(np.sort(routings["experts"], axis=-1), axis=-1) > 0).all(), (
        "a token chose one expert twice"
    )
    assert routings["experts"].max() < 32


def test_routings_are_split_by_document_as_the_manifest_is(routings: dict[str, npt.NDArray[Any]]) -> None:
    manifest = {entry["sha256"]: entry for entry in heldout.read_manifest()}
    used = {
        part: set(routings["document"][routings["part"] == number]) for number, part in enumerate((FIT, TEST))
    }
    assert not used[FIT] & used[TEST]
    for row in range(len(routings["tokens"])):
        entry = manifest[str(routings["documents"][routings["document"][row]])]
        assert (entry["part"], entry["domain"]) == (
            (FIT, TEST)[routings["part"][row]],
            DOMAINS[routings["domain"][row]],
        )


def test_prompts_and_unsampled_continuations_are_the_documents_own(
    routings: dict[str, npt.NDArray[Any]], documents: list[Document]
) -> None:
    texts = {document.digest: document.text for document in documents}
    for row in np.flatnonzero(routings["part"] == 1):
        start, length = (
            int(routings["start"][row]),
            PROMPT_TOKENS if routings["sampled"][row] else REQUEST_TOKENS,
        )
        text = texts[str(routings["documents"][routings["document"][row]])]
        assert routings["tokens"][row, :length].tobytes() == text[start : start + length]


def test_recorded_routings_are_what_the_model_chooses_now(
    model: Any, routings: dict[str, npt.NDArray[Any]]
) -> None:
    rows = np.arange(0, len(routings["tokens"]), 60)
    tokens = routings["tokens"][rows]
    with torch.no_grad(), router_outputs(model) as routed:
        model.model(input_ids=torch.from_numpy(tokens.astype(np.int64)), use_cache=False)
    for layer, (logits, _) in enumerate(routed):
        recorded = torch.from_numpy(routings["experts"][rows, :, layer].reshape(-1, 4).astype(np.int64))
        chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, recorded, value=True)
        worst_chosen = logits.masked_fill(~chosen, torch.inf).amin(1)
        best_left = logits.masked_fill(chosen, -torch.inf).amax(1)
        assert (worst_chosen - best_left).min() > -1e-3, (
            f"layer {layer}: an expert was recorded that is not among the best four"
        )


def test_requests_of_one_domain_route_alike_and_more_so_than_untrained(
    routings: dict[str, npt.NDArray[Any]],
) -> None:
    part = slice(160, 224)
    rows = np.arange(0, len(routings["tokens"]), 2)
    some = {
        name: array[rows] if array.ndim and len(array) == len(routings["tokens"]) else array
        for name, array in routings.items()
    }
    some |= {"prompt": np.array(32), "experts": some["experts"][:, part]}
    trained = measure_skew(some)
    control = measure_skew({**some, "experts": chosen_experts(control_model(), some["tokens"][:, part])})
    assert trained.cosine_same > control.cosine_same + 0.15
    assert abs(trained.cosine_cross) < 0.1
    assert trained.closed_gap(16, "domain") > 0.4


# The model itself


def test_it_has_learnt_every_domain(model: Any, documents: list[Document]) -> None:
    some = [
        Document(document.domain, document.source, document.text[: 2 * WINDOW]) for document in documents[::3]
    ]
    losses = losses_by_domain(model, some)
    assert set(losses) == set(DOMAINS)
    assert max(losses.values()) < 0.5 * np.log(256)


def test_it_stays_sane_to_the_end_of_its_context(model: Any, documents: list[Document]) -> None:
    long = [document for document in documents if len(document.text) >= CONTEXT_LENGTH]
    near, far = losses_by_position(model, long[::16], (128, WINDOW, CONTEXT_LENGTH - 1))
    assert np.isfinite([near, far]).all()
    assert far < near + 0.2


# The tools that made it


def test_a_machine_without_text_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "_FINDERS", {domain: lambda: iter(()) for domain in DOMAINS})
    lines: list[str] = []
    with pytest.raises(CorpusError, match="install"):
        gather([], seed=0, report=lines.append)
    assert len(lines) == len(DOMAINS)


def test_held_out_text_and_near_copies_of_it_are_not_trained_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    held_out = " ".join(f"word{number}" for number in range(400))
    (tmp_path / "copy.html").write_text(held_out.replace("word7 ", "other "))
    (tmp_path / "fresh.html").write_text(held_out.replace("word", "term"))
    nothing = {domain: lambda: iter(()) for domain in DOMAINS}
    monkeypatch.setattr(corpus, "_FINDERS", {**nothing, "html": lambda: tmp_path.rglob("*.html")})
    found = gather([held_out.encode()], seed=0, report=lambda _: None)
    assert [Path(document.source).name for document in found["html"]] == ["fresh.html"]


def test_near_copies_are_noticed_both_ways_round() -> None:
    part, whole = " ".join(map(str, range(100))), " ".join(map(str, range(1000)))
    assert NearCopies([part.encode()]).has(whole.encode())
    assert NearCopies([whole.encode()]).has(part.encode())
    assert not NearCopies([part.encode()]).has(" ".join(map(str, range(500, 1000))).encode())


def test_roff_markup_goes_and_its_words_stay() -> None:
    page = (
        '.\\" comment\n.TH X 1\n.SH NOM\nun \\fBx\\fR \\- d\\(:ef\n.B gras\nsuite\\*(Aqun\n.PP\n.nf\na\n'
        " b\n.fi\nfin\n"
    )
    assert strip_roff(page) == "NOM\nun x - d\u00ebf gras suite'un\na\n b\nfin\n"


def test_an_excerpt_starts_at_a_line_and_never_splits_a_character() -> None:
    text = ("\u65e5\u672c\n" * 100).encode()
    excerpt = middle(text, 50)
    assert len(excerpt) <= 50
    assert excerpt.decode("utf-8").startswith("\u65e5\u672c\n")
    assert middle(b"short", 50) == b"short"


def test_requests_of_a_document_are_disjoint_and_start_at_a_character() -> None:
    document = Document("ja", "here", ("\u65e5" * 600).encode())
    starts = windows(document, 3)
    assert len(starts) == 3
    assert all(start % 3 == 0 for start in starts)
    assert np.diff(starts).min() >= REQUEST_TOKENS
    assert starts[-1] + REQUEST_TOKENS <= len(document.text)


def test_the_schedule_is_a_function_of_the_step() -> None:
    assert rate(1, 1000) < rate(40, 1000) == 1.0
    assert rate(1000, 1000) == pytest.approx(0.04)
    assert {window_length(step, 1000) for step in range(1, 501)} == {WINDOW}
    assert {window_length(step, 1000) for step in range(501, 1001)} == {WINDOW, 1024, CONTEXT_LENGTH}


def test_the_balance_loss_is_one_when_experts_are_used_alike_and_more_when_not() -> None:
    logits = torch.zeros(8, 4)
    alike = torch.arange(8).view(8, 1) % 4
    assert balance_loss(logits, alike).item() == pytest.approx(1.0)
    logits[:, 0] = 5.0
    assert balance_loss(logits, torch.zeros(8, 1, dtype=torch.long)).item() > 3


def test_muon_moves_along_an_orthogonal_matrix() -> None:
    matrix = torch.randn(3, 20, 50, generator=torch.Generator().manual_seed(0))
    singular = torch.linalg.svdvals(orthogonalise(matrix))
    assert singular.min() > 0.5
    assert singular.max() < 1.4


def test_the_same_seed_trains_the_same_model_and_its_checkpoint_loads(tmp_path: Path) -> None:
    text = np.frombuffer(b"one two three four five six seven eight nine ten\n" * 100, dtype=np.uint8)
    runs = [train([text], steps=2, seed=3) for _ in range(2)]
    first, second = (dict(run.named_parameters()) for run in runs)
    assert all(torch.equal(first[name], second[name]) for name in first)
    write_checkpoint(runs[0], tmp_path / "again")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert all(
        torch.equal(parameter, first[name].to(torch.bfloat16))
        for name, parameter in loaded.named_parameters()
    )
