"""Texts on which two engines must agree before the faster one is used."""

from __future__ import annotations

PROBE = (
    "",
    " ",
    "a",
    " Hello",
    "Hello, world! It's 2024; they'll've \"won\" 1234567.89€ (~50%)…",
    "The quick brown fox jumps over the lazy dog. THE QUICK BROWN FOX. tHe qUiCk. Don't, DON'T, don’t.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. L'été, où ça? ¿Qué tal, señor? Žluťoučký kůň.",
    "Съешь же ещё этих мягких французских булок. Ξεσκεπάζω την ψυχοφθόρα βδελυγμία. Պարտքի տարեկան",
    "我能吞下玻璃而不伤身体。私はガラスを食べられます。それは私を傷つけません。나는 유리를 먹을 수 있어요.",
    "أنا قادر على أكل الزجاج و هذا لا يؤلمني. אני יכול לאכול זכוכית. ฉันกินกระจกได้ मैं काँच खा सकता हूँ। நான் கண்ணாடி",
    "👩‍👩‍👧‍👦 👍🏽 🇩🇪 ❤️ 🤗🤗 ☃ ①②③ ﬁ ﬀ ™ Å Å e\u0301 ｆｕｌｌ ㎏ ½ x² \u200b\u200d\ufeff \u00a0\u3000 \U0010fffd",
    "def f(x: int) -> str:\n    if x == 0:\n\t\treturn f'{x!r}'\r\n    return {'a': [1, 2, 3]}['a'][::-1]\n\n\n",
    '<html><body class="x">&amp;</body></html>\n{"key": [null, true, -1.5e10], "s": "\\u00e9\\n"}\nSELECT * FROM t;',
    "for(i=0;i<n;++i){a[i]<<=2;b&&c||d;}//--**/ #include <stdio.h>\n$ ls -la | grep '^d' >> /dev/null 2>&1",
    "a  b   c    d     e      f\t\tg\t \th\n\n\ni \n j  \n\n  k\r\n\r\nl\r\r \u2003 \u2028 trailing   ",
    "   leading spaces\n    indented\n        more\n",
    "<|im_start|>user\nHi<|im_end|>\n<|eot|><|sys|> <s></s> <unk> [INST] <think></think> <|endoftext|> <｜User｜>",
    "<|im_st art|> im_end|> <|eo t|> <| eot |> <<|eot|>> |>|><|<| <0x0A> <0xFF> [CLS] [SEP] ▁ ▁▁ Ġ Ċ ##ing @@ </w>",
    "x" * 300 + "-" * 120 + "=" * 70 + " " * 130 + "\n" * 40 + "ha" * 90 + "1" * 50 + "।" * 20 + "😀" * 30,
)
