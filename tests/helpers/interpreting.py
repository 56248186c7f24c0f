"""Triton's interpreter in a third of the time: without work of which it uses no result. Values stay the same bits."""

import functools
from dataclasses import replace

import triton.language as tl
from triton.runtime import interpreter


@functools.cache
def _languages(function):
    """Which modules of the language a function sees by name: these are prepared for it."""
    return frozenset(m.__name__ for m in function.__globals__.values() if m is tl or m is tl.core)


def speed_up():
    """Prepare the language once a launch, not again in each function that a kernel calls; skip unused checks.

    Overflow is computed for assertions that are evaluated with `debug` only. Releases of triton whose interpreter
    differs stay as they are.
    """
    if not hasattr(interpreter, "_LangPatchScope") or hasattr(interpreter._patch_lang, "prepared"):
        return
    interpreter._patch_lang = _once_a_launch(interpreter._patch_lang)
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)


def _once_a_launch(prepare):
    """What prepares the language for a function, unless it was prepared since the launch began."""
    prepared = set()

    def once(function):
        languages = _languages(function)
        if languages in prepared:
            return None  # only a launch reads what is returned, and it always prepares something
        is_launch = not prepared
        prepared.add(languages)
        scope = prepare(function)
        if is_launch:
            restore = scope.restore
            scope.restore = lambda: (prepared.clear(), restore())
        return scope

    once.prepared = prepared
    return once
