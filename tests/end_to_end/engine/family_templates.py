"""Chat templates of model families: what they do with roles, tools and thoughts, in short."""

from __future__ import annotations

_TOOLS_IN_SYSTEM = """\
{%- if tools %}{{ '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}
{{- 'Functions:' }}{% for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{% endif %}
"""
CHATML = (
    _TOOLS_IN_SYSTEM
    + """\
{%- set found = namespace(last=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set found.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}
{%- if message.reasoning_content is string and loop.index0 > found.last %}
{{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}{{ call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""
)
LLAMA3 = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}{% set messages = messages[1:] %}
{%- else %}{% set system = '' %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nCutting Knowledge Date: December 2023\\n' }}
{{- 'Today Date: ' + (date_string if date_string is defined else '26 Jul 2024') + '\\n\\n' + system }}
{%- if tools %}{{ '\\nFunctions:' }}
{%- for tool in tools %}{{ '\\n' }}{{ tool | tojson(indent=4) }}{% endfor %}{% endif %}
{{- '<|eot_id|>' }}
{%- for message in messages %}
{%- if message.role in ('tool', 'ipython') %}{{ '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
{%- if message.content is mapping or message.content is iterable and message.content is not string %}
{{- message.content | tojson }}{% else %}{{ message.content }}{% endif %}{{ '<|eot_id|>' }}
{%- elif message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('This model only supports single tool-calls at once!') }}
{%- endif %}{% set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
{{- call.arguments | tojson }}{{ '}<|eot_id|>' }}
{%- else %}{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
{{- message.content | trim + '<|eot_id|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""
DEEPSEEK = """\
{%- if thinking is not defined %}{% set thinking = false %}{% endif %}
{%- set found = namespace(system='', user=false) %}
{%- for message in messages %}{% if message.role == 'system' %}
{%- set found.system = found.system + ('\\n\\n' if found.system else '') + message.content %}{% endif %}{% endfor %}
{{- bos_token }}{{ found.system }}
{%- for message in messages %}
{%- if message.role == 'user' %}{% set found.user = true %}{{ '<｜User｜>' + message.content }}
{%- elif message.role == 'assistant' %}
{%- if found.user %}{{ '<｜Assistant｜></think>' }}{% endif %}{% set found.user = false %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}
{{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' }}{{ call.function.arguments | tojson }}
{{- '<｜tool▁call▁end｜>' }}{% endfor %}{{ '<｜end▁of▁sentence｜>' }}
{%- elif message.role == 'tool' %}{{ '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}{% endif %}
{%- endfor %}
{%- if found.user and add_generation_prompt %}
{{- '<｜Assistant｜>' }}{{ '<think>' if thinking else '</think>' }}{% endif %}
"""
GEMMA = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}
{%- if messages[0].content is string %}{% set first = messages[0].content + '\\n\\n' %}
{%- else %}{% set first = messages[0].content[0].text + '\\n\\n' %}{% endif %}{% set rest = messages[1:] %}
{%- else %}{% set first = '' %}{% set rest = messages %}{% endif %}
{%- for message in rest %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
{{- first if loop.first else '' }}
{%- if message.content is string %}{{ message.content | trim }}
{%- else %}{% for part in message.content %}
{%- if part.type == 'image' %}{{ '<start_of_image>' }}{% elif part.type == 'text' %}{{ part.text | trim }}{% endif %}
{%- endfor %}{% endif %}{{ '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}
"""
IDEFICS = """\
{{- bos_token }}
{%- for message in messages %}{{ message.role | capitalize + ': ' }}
{%- if message.content is string %}{{ message.content }}
{%- else %}{% for part in message.content %}
{%- if part.type == 'image' %}{{ '<image>' }}{% elif part.type == 'text' %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}{{ '<end_of_utterance>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}
"""
