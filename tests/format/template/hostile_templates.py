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
"""Templates that loop or grow forever."""

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
"""Templates that access forbidden objects."""

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
"""Templates that raise an error."""

GROWN = "{% set n = namespace(x=range(99999) | list) %}{% for i in range(3) %}{% set n.x = n.x + n.x %}{% endfor %}"
NESTED = "{% set n = namespace(x=(1,)) %}{% for i in range(60000) %}{% set n.x = (n.x,) %}{% endfor %}"
DOUBLED = (
    "{% set n = namespace(x=['a'], y=['a']) %}"
    "{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}{% endfor %}"
)
AGAIN = "{%% for i in range(9999) %%}{%% set y = %s %%}{%% endfor %%}"

EXHAUSTING = [
    *(GROWN + AGAIN % work for work in ("'zz' in n.x", "n.x == n.x | list", "n.x | sum", "n.x | sort", "n.x | max")),
    *(
        GROWN + AGAIN % work
        for work in ("n.x | unique | list", "n.x | map('string') | list", "n.x[::-1]", "n.x | reverse | list")
    ),
    GROWN + "{% set z = namespace(k=[]) %}{% for i in range(9999) %}{% set z.k = z.k + [n.x | list] %}{% endfor %}",
    GROWN + "{{ n.x | tojson }}",
    GROWN + "{{ n.x | groupby(0) | list }}",
    *(
        NESTED + "{{ " + work + " }}"
        for work in ("n.x", "n.x | tojson", "n.x | string", "n.x | pprint", "[n.x] | join")
    ),
    *(DOUBLED + "{{ " + work + " }}" for work in ("n.x", "n.x | tojson", "n.x == n.y", "n.x in [n.y]", "'%s' % n.x")),
    *(
        DOUBLED + "{{ " + work + " }}"
        for work in ("n.x | pprint", "'{}'.format(n.x)", "raise_exception(n.x)", "n.x ~ 1")
    ),
    "{% set z = namespace(k=[]) %}{% for i in range(60000) %}{% set z.k = [z.k, 'x' * 1000000] %}{% endfor %}",
    "{{ ('a ' * 500000) | wordwrap(1) }}{{ nonsense }}",
    "{{ ('f' * 1000000) | int(base=16) // 3 }}",
    "{{ (2 ** 4000) // 7 % 3 }}",
    "{{ ('ab' * 100000).translate({97: 'x' * 100000}) }}",
    "{{ ('a\n' * 100000) | indent(1000000) }}",
    "{{ ('%' ~ '9' * 8 ~ 'd') % 1 }}",
    "{{ '%*d' % (99999999, 1) }}",
    "{{ '%.99999999f' % 1.5 }}",
    "{{ '{:>{w}}'.format(1, w=99999999) }}",
    "{{ ('{0:>9999}' * 100000).format(1) }}",
    "{{ strftime_now('%99999999d') }}",
    "{{ strftime_now('%A' * 400000) }}",
    "{{ range(99999) | batch(999999999, 'x') | list }}",
    "{{ [0] | slice(99999999) | list }}",
    "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "{% macro f() %}{{ caller() }}{% endmacro %}"
    "{% macro g() %}{% call f() %}{{ g() }}{% endcall %}{% endmacro %}{{ g() }}",
    "{% for c in messages[0].content * 30000 %}{{ c }}.{% endfor %}",
    "{{ '\\ud800' }}",
    "{{ messages[0].content * 900000 }}",
]
"""Templates that use a lot of time or memory in a single operation, during which no steps are counted."""

OBJECTS = (
    *("''", "messages", "messages[0]", "messages[0].content", "[]", "{}", "()", "1", "1.5", "none", "true", "range(3)"),
    *("raise_exception", "strftime_now", "namespace", "namespace(a=1)", "dict", "dict(a=1)", "range", "lipsum", "self"),
    *("cycler", "cycler('a')", "cycler('a').next", "joiner", "joiner(',')", "loop", "loop.cycle", "f", "caller"),
    *("nothing", "messages[0].nothing", "''.join", "''.format", "'x'.upper", "{}.items()", "{}.get", "('x' | e)"),
    *("('x' | safe)", "(messages | map('length'))", "(messages | groupby('role') | first)", "(messages | items)"),
)
"""Objects that a template can access."""

NAMES = (
    *("__class__", "__init__", "__globals__", "__builtins__", "__mro__", "__base__", "__subclasses__", "__dict__"),
    *("__getattribute__", "__func__", "__self__", "__code__", "__wrapped__", "__call__", "__module__", "__reduce_ex__"),
    *("gi_frame", "f_back", "f_globals", "cr_frame", "tb_frame", "func_globals", "im_func", "mro", "_environment"),
    *("_func", "_undefined_obj", "_undefined_exception", "_fail_with_undefined_error", "_TemplateReference__context"),
    *("_Namespace__attrs", "_iterable", "_recurse", "environment", "eval_ctx", "parent", "blocks", "exported_vars"),
    *("pieces", "trace", "plain", "observe", "format_map", "encode", "translate", "maketrans", "fromkeys", "real"),
)
"""Names of attributes that a hostile template could try to access."""

WAYS = (
    *("{{ S.N }}", "{{ S['N'] }}", "{{ S | attr('N') }}", "{{ (S.N)() }}", "{{ S.N.N }}", "{{ S.N['N'] }}"),
    *(
        "{{ [S] | map(attribute='N') | list }}",
        "{{ [S] | map('attr', 'N') | list }}",
        "{{ [S] | selectattr('N') | list }}",
    ),
    *("{{ [S] | sort(attribute='N') }}", "{{ [S] | groupby('N') | list }}", "{{ [S] | sum(attribute='N') }}"),
    *(
        "{{ [S] | join(',', attribute='N') }}",
        "{{ [S] | unique(attribute='N') | list }}",
        "{{ [S] | max(attribute='N') }}",
    ),
    *(
        "{{ '{0.N}'.format(S) }}",
        "{{ '{0[N]}'.format(S) }}",
        "{{ '{x.N:>1}'.format(x=S) }}",
        "{{ '{:{0.N}}'.format(S) }}",
    ),
    *("{{ '{0:>1}{1.N}'.format(' ', S) }}", "{{ '{0!r:>1}{0.N!s}'.format(S) }}", "{{ '{0!r}'.format(S) }}"),
    *("{{ ['{0.N}'] | map('format', S) | list }}", "{{ ('{0.N}' | safe).format(S) }}", "{{ ('{0.N}' | e).format(S) }}"),
    *("{{ ''.join(['{0.', 'N}']).format(S) }}", "{% set g = '{0:>1}{1.N}'.format %}{{ g(1, S) }}"),
    *(
        "{{ '%s' % S }}",
        "{{ '%r' % [S] }}",
        "{{ '%(x)s' % {'x': S} }}",
        "{{ '%s' | format(S) }}",
        "{{ S }}",
        "{{ [S] }}",
    ),
    *("{{ {'x': S} }}", "{{ S ~ '' }}", "{{ [S] | join }}", "{{ S | string }}", "{{ S | upper }}", "{{ S | tojson }}"),
    *("{{ S | pprint }}", "{{ S | e }}", "{{ S | urlencode }}", "{{ S | center(9) }}", "{{ S | replace('a', 'b') }}"),
    *("{{ raise_exception(S) }}", "{{ raise_exception(S.N) }}", "{{ raise_exception([S]) }}", "{{ S(S) }}"),
    *("{% set n = namespace(x=S) %}{{ n.x.N }}", "{% set n = namespace(N=1) %}{{ n.N }}", "{{ dict(x=S) }}"),
    *("{% for x in S %}{{ x.N }}{% endfor %}", "{% for x in S.N %}{{ x }}{% endfor %}", "{{ S | list | string }}"),
    *("{% if S.N is defined %}{{ S.N }}{% endif %}", "{{ S.N is callable }}{{ S.N }}", "{% call S() %}{% endcall %}"),
    *(
        "{% with x = S %}{{ x.N }}{% endwith %}",
        "{% filter format(S) %}%s{% endfilter %}",
        "{{ S[0].N }}",
        "{{ S[:1].N }}",
    ),
    *("{% set S2 = S.N %}{{ S2 }}", "{{ strftime_now(S) }}", "{{ 'x'.join([S]) }}", "{{ 'x'.replace('x', S) }}"),
)
"""Template expressions that access an attribute; S stands for the object, and N for the attribute name."""


def prying(number: int) -> str:
    """Return the template with this number, which tries to access an attribute that the sandbox protects."""
    way, number = WAYS[number % len(WAYS)], number // len(WAYS)
    subject, name = OBJECTS[number * 7 % len(OBJECTS)], NAMES[number * 11 % len(NAMES)]
    body = (
        way.replace("S", subject).replace("N", name)
        if "S2" not in way
        else "{% set o = " + subject + "." + name + " %}{{ o }}"
    )
    return "{% macro f() %}{{ caller }}{% endmacro %}{% for m in messages %}" + body + "{% endfor %}"
