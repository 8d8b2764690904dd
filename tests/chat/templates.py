"""Chat templates in the styles of model families, and what ends a turn in each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    template: str
    ends: tuple[str, ...]
    """Tokens that end a turn."""
    text: str = ""
    """A marker of several tokens that ends a turn."""


def _calls(begin: str, end: str) -> str:
    return (
        "{% for c in m.tool_calls or [] %}" + begin + '{"name": "{{ c.function.name }}", "arguments": '
        "{{ c.function.arguments | tojson }}}" + end + "{% endfor %}"
    )


STYLES: dict[str, Style] = {
    "chatml": Style(
        template="{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        ends=("<|im_end|>",),
    ),
    "qwen": Style(
        template="{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        + _calls("\n<tool_call>\n", "\n</tool_call>")
        + "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        ends=("<|im_end|>",),
    ),
    "llama3": Style(
        template="{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
        "{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
        "<|python_tag|>{{ m.tool_calls[0].function.name }}<|eom_id|>"
        "{% else %}{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
        ends=("<|eot_id|>", "<|eom_id|>"),
    ),
    "gemma": Style(
        template="{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}<|turn>"
        "{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<turn|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|turn>model\n{% endif %}",
        ends=("<turn|>",),
    ),
    "mistral": Style(
        template="{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% else %} {{ m.content | trim }}{{ eos_token }}{% endif %}{% endfor %}",
        ends=("<|eos|>",),
    ),
    "deepseek": Style(
        template="{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
        "{% else %}<｜Assistant｜>{{ m.content }}{% if m.tool_calls %}<｜tool▁calls▁begin｜>"
        + _calls("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
        + "<｜tool▁calls▁end｜>{% endif %}<｜end▁of▁sentence｜>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<｜Assistant｜>{% endif %}",
        ends=("<｜end▁of▁sentence｜>",),
    ),
    "phi": Style(
        template="{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}",
        ends=("<|end|>", "<|eos|>"),
    ),
    "harmony": Style(
        template="{% for m in messages %}<|start|>{{ m.role }}{% if m.tool_calls %}"
        " to={{ m.tool_calls[0].function.name }}<|channel|>commentary<|message|>"
        "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
        "{% elif m.role == 'assistant' %}<|channel|>final<|message|>{{ m.content }}"
        "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
        "{% else %}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}",
        ends=("<|return|>", "<|call|>"),
    ),
    "glm": Style(
        template="[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
        ends=("<|user|>",),
    ),
    "glm_calls": Style(
        template="[gMASK]<sop>{% for m in messages %}"
        "{{ '<|observation|>' if m.role == 'tool' else '<|' + m.role + '|>' }}\n{{ m.content }}"
        + _calls("<tool_call>", "</tool_call>")
        + "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
        ends=("<|user|>", "<|observation|>"),
    ),
    "open_last_turn": Style(
        template="{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% if not loop.last %}<|im_end|>\n"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_end|>\n<|im_start|>assistant\n{% endif %}",
        ends=("<|im_end|>",),
    ),
    "calls_close_themselves": Style(
        template="{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.tool_calls %}"
        + _calls("<|tool_call>", "<tool_call|>")
        + "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        ends=("<|im_end|>",),
    ),
    "plain_token": Style(
        template="{% for m in messages %}{{ m.role }}: {{ m.content }}</assistant>\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}",
        ends=("</assistant>",),
    ),
    "several_tokens": Style(
        template="{% for m in messages %}[{{ m.role }}]{{ m.content }}[/{{ m.role }}]\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}",
        ends=(),
        text="[/assistant]",
    ),
    "quoted": Style(
        template='{% for m in messages %}{{ m.role }}: "{{ m.content }}"\n{% endfor %}'
        '{% if add_generation_prompt %}assistant: "{% endif %}',
        ends=(),
    ),
    "none": Style(
        template="{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}",
        ends=(),
    ),
    "broken": Style(template="{{ raise_exception('no') }}", ends=()),
}
