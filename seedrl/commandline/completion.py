"""Tab completion: the words that could stand at the end of a line, and the scripts by which bash and zsh ask for them.

A shell calls `seedrl completion words WORD …`, whose last word is the one to complete and may be empty. Answers come
without an import of Hydra, torch or numpy, because people wait for them. Knows no command.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from seedrl.commandline.command import Command
from seedrl.commandline.line import ALL, HELP, SWEEP, VERSION
from seedrl.commandline.settings import Setting, Vocabulary
from seedrl.errors import ConfigError

WORDS = "words"  # what a script asks for
# bash takes = and : as ends of words, so what stands before the last of them in a word must not be repeated.
BASH = r"""_seedrl() {
  local line=${COMP_LINE:0:COMP_POINT} words word
  read -r -a words <<< "$line"
  [[ $line == *[[:space:]] ]] && words+=("")
  word=${words[${#words[@]}-1]}
  mapfile -t COMPREPLY < <(seedrl completion words "${words[@]:1}" 2> /dev/null)
  local before=${word%"${word##*[=:]}"}
  COMPREPLY=("${COMPREPLY[@]#"$before"}")
  compopt -o nospace
  [[ ${#COMPREPLY[@]} -eq 1 && $COMPREPLY != *[=./] ]] && compopt +o nospace
}
complete -F _seedrl seedrl"""
ZSH = r"""(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
_seedrl() {
  local -a replies finished
  replies=("${(@f)$(seedrl completion words "${(@)words[2,CURRENT]}" 2> /dev/null)}")
  finished=(${replies:#*[=./]})
  replies=(${(M)replies:#*[=./]})
  (( $#finished )) && compadd -Q -- "${finished[@]}"
  (( $#replies )) && compadd -Q -S '' -- "${replies[@]}"
}
compdef _seedrl seedrl"""
NAMED = re.compile(r"(\w+)($|[ ]\()")  # one word, which may be explained in parentheses
SCRIPTS = {"bash": BASH, "zsh": ZSH}


def run_completion(commands: Mapping[str, Command], arguments: Sequence[str]) -> None:
    """Print the script of a shell, or the words that complete a line."""
    if arguments[:1] == [WORDS]:
        for word in sorted(set(completions(commands, arguments[1:]))):
            print(word)
        return
    shell = arguments[0] if arguments else Path(os.environ.get("SHELL", "bash")).name
    if shell not in SCRIPTS:
        raise ConfigError(f"there is no completion for {shell}; seedrl completion {'|'.join(SCRIPTS)}")
    print(SCRIPTS[shell])


def completions(commands: Mapping[str, Command], words: Sequence[str]) -> Iterator[str]:
    """Yield the words that could stand in place of the last one."""
    *before, word = words or [""]
    names = [each for each in before if each in commands]
    if not names:
        yield from _starting(word, [*commands, HELP[0], VERSION[0], "completion"])
        return
    command = commands[names[0]]
    vocabulary = Vocabulary(names[0], command.schema)
    key, is_value, value = word.partition("=")
    prefix = "+" * (len(key) - len(key.lstrip("+")))
    if is_value:
        yield from (f"{key}={each}" for each in _values(vocabulary, key.lstrip("+"), value))
    elif before and before[-1] in HELP:
        yield from _starting(word, [ALL])
    elif word.startswith("-"):
        yield from _starting(word, [*_flags(vocabulary), HELP[0], VERSION[0], *SWEEP, "--cfg"])
    else:
        yield from (f"{prefix}{each}" for each in _keys(vocabulary, key.lstrip("+")))
        if (command.words or command.run) and not prefix:
            yield from _paths(word)
        yield from _starting(word, [verb for verb, _, _ in command.verbs])


def _keys(vocabulary: Vocabulary, start: str) -> Iterator[str]:
    """Yield keys up to their next dot, so that no list is long."""
    yield from (f"{group}=" for group in vocabulary.presets if group.startswith(start))
    for key, setting in vocabulary.settings.items():
        if key.startswith(start):
            section, dot, _ = key[len(start) :].partition(".")
            yield f"{start}{section}." if dot else f"{key}{'.' if setting.is_free else '='}"


def _values(vocabulary: Vocabulary, key: str, start: str) -> Iterator[str]:
    setting = vocabulary.find(key)
    if key in vocabulary.presets:
        yield from _starting(start, vocabulary.presets[key])
    elif setting is not None and setting.choices:
        yield from _starting(start, setting.choices)
    elif setting is not None and str in setting.types:
        yield from _starting(start, _named(setting)) if _named(setting) else _paths(start)


def _named(setting: Setting) -> list[str]:
    """Return the values that a meaning lists, as in `torch | onnx`."""
    parts = setting.meaning.split(" | ")
    return [found[1] for part in parts if len(parts) > 1 and (found := NAMED.match(part))]


def _flags(vocabulary: Vocabulary) -> list[str]:
    return [f"--{setting.key}" for setting in vocabulary.settings.values() if setting.default is False]


def _paths(start: str) -> Iterator[str]:
    """Yield the files and directories that begin like this; directories end with a slash."""
    directory, name = os.path.split(start)
    try:
        found = sorted(os.scandir(directory or "."), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in found:
        if entry.name.startswith(name) and (name.startswith(".") or not entry.name.startswith(".")):
            yield os.path.join(directory, entry.name) + ("/" if entry.is_dir() else "")


def _starting(start: str, words: Sequence[str]) -> list[str]:
    return [word for word in words if word.startswith(start)]
