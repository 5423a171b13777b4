"""A good template, and what to put behind it to make it a bad one."""

from __future__ import annotations

GOOD = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
PROMPT = "{{ '<|assistant|>' if add_generation_prompt else '' }}"
CONTROL = ["<|user|>", "<|assistant|>", "<|end|>"]

ENDLESS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{{ a }}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
    "{{ 'x' * 999999999 }}",
    "{{ ([0] * 999999999) | length }}",
    "{% set ns = namespace(x='ab') %}{% for a in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for a in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for a in range(60) %}{% set ns.x = ns.x.replace('a', ns.x) %}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for a in range(60) %}{% set ns.x = [ns.x, ns.x] | join %}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for a in range(60) %}{% set ns.x = ns.x.join([ns.x, ns.x]) %}{% endfor %}",
    "{{ 9 ** 99999999 }}",
    "{% set ns = namespace(x=7) %}{% for a in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "{{ 'x'.ljust(999999999) }}",
    "{{ 'x' | center(999999999) }}",
    "{{ '%999999999d' % 1 }}",
    "{{ '{:>999999999}'.format(1) }}",
    "{{ [1] | tojson(indent=999999999) }}",
]
"""They loop or grow for ever."""

PRYING = [
    "{{ ''.__class__ }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ [].__class__.__base__.__subclasses__() }}",
    "{{ messages.append(1) }}",
    "{{ messages.clear() }}",
    "{{ messages[0].update(role='x') }}",
    "{{ messages[0].pop('content') }}",
    "{{ messages[0].setdefault('x', 1) }}",
    "{% set ns = namespace(__init__=1) %}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "{{ raise_exception.__globals__ }}",
    "{{ raise_exception.__globals__['__builtins__']['open']('/etc/hostname').read() }}",
    "{{ strftime_now.__func__.__globals__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ dict.__class__.__mro__ }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{{ '{0.__class__.__mro__}'.format('x') }}",
    "{{ '%s' | format(messages.__class__) }}",
    "{{ messages | attr('__class__') }}",
    "{{ ('' | attr('__class__')).__mro__ }}",
    "{{ messages | map(attribute='__class__') | list }}",
    "{{ messages | map('attr', '__class__') | list }}",
    "{{ messages | groupby('__class__') }}",
    "{{ messages | sum(attribute='__class__') }}",
    "{{ (messages | first).__getitem__.__func__ }}",
    "{% for m in messages %}{{ loop.__class__ }}{% endfor %}",
    "{% macro f() %}{% endmacro %}{{ f.__globals__ }}",
    "{{ range.__self__ }}",
    "{{ lipsum.__globals__ }}",
]
"""They reach for what is not theirs."""

FAILING = [
    "{{ raise_exception('no\nway') }}",
    "{{ raise_exception('x' * 100000) }}",
    "{{ nonsense }}",
    "{{ messages[9].content }}",
    "{{ messages[0].content + 1 }}",
    "{{ 1 / 0 }}",
    "{{ [1, 2] | random }}",
    "{{ lipsum() }}",
    "{{ messages | tojson(indent='\\ud800') }}{{ messages[0].content.encode('ascii') + 1 }}",
    "{{ messages[0].content.index('no such word') }}",
    "{{ {}['x'].y.z }}",
    "{{ [3, 'x', none] | sort }}",
    "{{ 'x' | int(base=99) }}{{ messages['x'].y }}",
]
"""They break down."""
