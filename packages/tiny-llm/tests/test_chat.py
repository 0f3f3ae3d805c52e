"""Chat templates are rendered as transformers renders them, and lead from a line to an answer."""

import json

import pytest
import torch

from tiny_llm.bpe import BPETokenizer
from tiny_llm.chat_template import ChatTemplate, chat_template_of
from tiny_llm.cli import main
from tiny_llm.errors import ConfigError, FileError, FormatError
from tiny_llm.opened import open_model
from tiny_llm.pretrained.tokenizer import PretrainedTokenizer

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

CHATML = (
    "{% for message in messages %}\n"
    "    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}\n"
    "{% endfor %}\n"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
PICKY = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if loop.last %}{% continue %}{% endif %}"
    "[{{ message | tojson }}] {{ message['content'] | trim }}{{ eos_token }}\n{% endfor %}"
)
MESSAGES = [
    {"role": "user", "content": "Was heißt 漢字? "},
    {"role": "assistant", "content": "Zeichen\n"},
    {"role": "user", "content": "Thanks."},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint as transformers writes it: a random model, a tokenizer, a template."""
    path = tmp_path_factory.mktemp("checkpoint")
    BPETokenizer.train([b"user assistant system hello " * 9], 300).save(path / "raw.json")
    engine = tokenizers.Tokenizer.from_file(str(path / "raw.json"))
    engine.add_special_tokens(["<s>", "</s>", "<|im_start|>", "<|im_end|>"])
    engine.add_tokens([tokenizers.AddedToken("<think>", special=False)])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=engine, bos_token="<s>", eos_token="<|im_end|>", chat_template=CHATML
    )
    tokenizer.save_pretrained(path)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=320,  # padded: the tokenizer has fewer ids
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        eos_token_id=[engine.token_to_id("<|im_end|>"), engine.token_to_id("</s>")],
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def theirs(folder):
    return transformers.PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.parametrize("source", [CHATML, PICKY])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_conversation_is_written_as_transformers_writes_it(theirs, source, add_generation_prompt):
    ours = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "<|im_end|>"})
    expected = theirs.apply_chat_template(
        MESSAGES,
        chat_template=source,
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
    )
    rendered = ours.render(MESSAGES, add_generation_prompt=add_generation_prompt)
    assert rendered == expected
    assert "漢字" in rendered


def test_template_that_refuses_or_fails_is_one_line():
    picky = ChatTemplate(PICKY, {"bos_token": "", "eos_token": ""})
    with pytest.raises(ConfigError, match="refuses the conversation: roles must alternate"):
        picky.render(MESSAGES[1:])
    with pytest.raises(FormatError, match="cannot be rendered: 'list object' has no attribute"):
        ChatTemplate("{{ messages.nothing.at_all }}").render(MESSAGES)
    # what the sandbox is for
    with pytest.raises(FormatError, match=r"cannot be rendered: .*unsafe"):
        ChatTemplate("{{ ''.__class__.__mro__[1].__subclasses__() }}").render(MESSAGES)


def test_pretrained_tokenizer_gives_the_ids_of_transformers(folder, theirs):
    ours = PretrainedTokenizer.load(folder)
    text = "hello <think>né</think> 漢字<|im_end|>"
    ids = ours.encode(text)
    assert ids == theirs(text)["input_ids"]
    # special tokens have no text, those that are merely added do
    assert ours.decode(ids) == "hello <think>né</think> 漢字"
    assert ours.decode([319]) == ""
    rendered = theirs.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    expected = theirs(rendered, add_special_tokens=False)["input_ids"]
    assert ours.encode_rendered(rendered) == expected
    stops = {theirs.convert_tokens_to_ids(token) for token in ("<|im_end|>", "</s>")}
    assert ours.stop_tokens == stops


def test_chat_puts_the_whole_conversation_into_the_template(folder, capsys, monkeypatch):
    seen = []
    render = ChatTemplate.render

    def watching(self, messages, **settings):
        seen.append([dict(message) for message in messages])
        return render(self, messages, **settings)

    monkeypatch.setattr(ChatTemplate, "render", watching)
    monkeypatch.setattr("sys.stdin", iter(["hello\n", "again\n"]))
    monkeypatch.setattr("tiny_llm.talking._is_terminal", lambda: False)
    arguments = ["--checkpoint", str(folder), "--device", "cpu", "--max-new-tokens", "4"]
    assert main(["chat", *arguments, "--system", "Be brief.", "--temperature", "0"]) == 0
    first, second = seen
    assert first == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hello"},
    ]
    assert second[:2] == first
    assert second[2]["role"] == "assistant"
    assert second[3] == {"role": "user", "content": "again"}
    assert capsys.readouterr().out.startswith(second[2]["content"] + "\n")


def test_generate_answers_in_the_template_and_continues_without(folder, capsys):
    arguments = ["generate", "--checkpoint", str(folder), "--device", "cpu"]
    arguments += ["--max-new-tokens", "6", "--temperature", "0", "--prompt", "hello"]
    assert main(arguments) == 0
    assert capsys.readouterr().out.startswith("hello")
    assert main([*arguments, "--as-chat", "--precision", "bf16"]) == 0
    answer = capsys.readouterr().out
    assert not answer.startswith("hello")
    model = open_model(folder, device="cpu", precision="bf16").model
    assert {each.dtype for each in model.parameters()} == {torch.bfloat16}


def test_template_may_come_from_a_file_and_must_come_from_somewhere(
    folder, tmp_path, capsys, monkeypatch
):
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).symlink_to(folder / name)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert chat_template_of(tmp_path) is None
    arguments = ["--checkpoint", str(tmp_path), "--device", "cpu", "--max-new-tokens", "2"]
    assert main(["generate", *arguments, "--as-chat"]) == 2
    assert "has no chat template: name one with --chat-template" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", iter([]))
    assert main(["chat", *arguments, "--system", "x"]) == 2
    assert "--system is for checkpoints with a chat template" in capsys.readouterr().err
    (tmp_path / "plain.jinja").write_text("{{ messages[0].content }}:")
    template = ["--chat-template", str(tmp_path / "plain.jinja")]
    assert main(["generate", *arguments, "--as-chat", *template]) == 0
    capsys.readouterr()
    assert main(["generate", *arguments, "--as-chat", "--chat-template", "no.jinja"]) == 2
    assert "cannot read chat template no.jinja" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "template"),
    [
        ({"chat_template": "a"}, "a"),
        (
            {
                "chat_template": [
                    {"name": "tool_use", "template": "b"},
                    {"name": "default", "template": "c"},
                ]
            },
            "c",
        ),
        ({"chat_template": "a", "eos_token": {"content": "</s>"}}, "a"),
    ],
)
def test_template_is_found_in_the_tokenizers_configuration(tmp_path, content, template):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(content))
    found = chat_template_of(tmp_path)
    assert found is not None
    assert found.source == template
    assert found.special_tokens.get("eos_token") == ("</s>" if "eos_token" in content else None)
    (tmp_path / "chat_template.jinja").write_text("file")
    assert chat_template_of(tmp_path).source == "file"


def test_damaged_tokenizer_files_are_one_line(tmp_path):
    with pytest.raises(FileError, match=r"has no tokenizer\.json"):
        PretrainedTokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(FormatError, match="is no tokenizer file"):
        PretrainedTokenizer.load(tmp_path)
    BPETokenizer.train([b"abc"], 260).save(tmp_path / "tokenizer.json")
    with pytest.raises(FormatError, match="does not say which token ends a text"):
        PretrainedTokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(FormatError, match="must hold a JSON object"):
        PretrainedTokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": 3}')
    with pytest.raises(FormatError, match="`chat_template` must be text, got 3"):
        chat_template_of(tmp_path)
