"""Forms in which chat templates read the content of messages: one text, or a list of parts."""

import pytest

from router.bodies.tasks import foreign_prompt
from router.tokenization.tokenizer import ModelTokenizer
from tests.router.router_fixture import archive, bpe

PARTS = (
    "{% for m in messages %}{{ m.role }}:{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endfor %}"
)
TEXT = "{% for m in messages %}{{ m.role }}:{{ m['content'] }}{% endfor %}"
EITHER = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m['content'] | list %}<{{ part['text'] }}>{% endfor %}{% endif %}{% endfor %}"
)
MACRO = (
    "{% macro show(content) %}{% for part in content[0:] %}({{ part.text }}){% endfor %}{% endmacro %}"
    "{% for m in messages %}{{ show(m.content) }}{% endfor %}"
)
BODY = (
    b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"},'
    b' {"type": "text", "text": "b"}]}, {"role": "user", "content": "c"}]}'
)


@pytest.mark.parametrize(
    ("template", "in_parts", "rendered"),
    [
        (PARTS, True, "user:[a][b]user:[c]"),
        (TEXT, False, "user:a\nbuser:c"),
        (EITHER, True, "<a><b><c>"),
        (MACRO, True, "(a)(b)(c)"),
    ],
    ids=["parts", "text", "either", "macro"],
)
def test_a_template_gets_contents_in_the_form_that_it_reads(
    template: str, in_parts: bool, rendered: str
) -> None:
    tokenizer = ModelTokenizer.from_archive(archive(bpe(257), {"chat_template": template}))
    assert tokenizer.reads_parts is in_parts
    made = foreign_prompt(BODY, tokenizer, 1000, chat=True)
    assert made is not None
    assert tokenizer.decode(made.ids) == rendered


def test_a_prompt_that_does_not_fit_and_messages_that_a_template_refuses_have_no_ids() -> None:
    refusing = "{{ raise_exception('no') }}"
    tokenizer = ModelTokenizer.from_archive(archive(bpe(257), {"chat_template": refusing}))
    assert foreign_prompt(BODY, tokenizer, 1000, chat=True) is None
    assert foreign_prompt(b'{"prompt": "' + b"hello" * 9 + b'"}', tokenizer, 9, chat=False) is None
    assert foreign_prompt(b'{"prompt": [1, 2, 3]}', tokenizer, 3, chat=False) is None
    found = foreign_prompt(b'{"prompt": [1, 2, 3]}', tokenizer, 4, chat=False)
    assert found is not None
    assert found.ids == [1, 2, 3]
