"""Small programming tasks for a language model: how many of them does it complete so that all assertions hold?

Decoding is greedy. Completions are run, each in a process of its own with a limit of time, so take only models that you
trust.
"""

import subprocess
import sys
from typing import Any

import torch

# The header of a function with what it does, and assertions about it.
TASKS = (
    ("def add(a, b):", "Return the sum of a and b.", "add(2,3)==5 and add(-1,1)==0"),
    ("def is_even(n):", "Return True if n is even.", "is_even(4) is True and is_even(7) is False"),
    ("def factorial(n):", "Return n! for a non-negative integer n.", "factorial(0)==1 and factorial(5)==120"),
    (
        "def fibonacci(n):",
        "Return the n-th Fibonacci number, with fibonacci(0) == 0 and fibonacci(1) == 1.",
        "[fibonacci(i) for i in range(8)]==[0,1,1,2,3,5,8,13]",
    ),
    ("def reverse_string(s):", "Return s reversed.", "reverse_string('abc')=='cba' and reverse_string('')==''"),
    (
        "def is_palindrome(s):",
        "Return True if the string s reads the same backwards.",
        "is_palindrome('level') and not is_palindrome('ab')",
    ),
    (
        "def count_vowels(s):",
        "Return how many of the letters of s are vowels (aeiou), in either case.",
        "count_vowels('Education')==5 and count_vowels('xyz')==0",
    ),
    (
        "def largest(numbers):",
        "Return the largest number of a non-empty list.",
        "largest([3,9,2])==9 and largest([-5])==-5",
    ),
    ("def gcd(a, b):", "Return the greatest common divisor of two positive integers.", "gcd(12,18)==6 and gcd(7,5)==1"),
    (
        "def is_prime(n):",
        "Return True if n is a prime number.",
        "[i for i in range(20) if is_prime(i)]==[2,3,5,7,11,13,17,19]",
    ),
    ("def flatten(lists):", "Flatten a list of lists into one list.", "flatten([[1],[2,3],[]])==[1,2,3]"),
    (
        "def unique(items):",
        "Return the items without duplicates, in the order of their first appearance.",
        "unique([3,1,3,2,1])==[3,1,2]",
    ),
    (
        "def word_count(text):",
        "Return a dict from each word of text to the number of times it appears.",
        "word_count('a b a')=={'a':2,'b':1}",
    ),
    (
        "def celsius_to_fahrenheit(c):",
        "Convert degrees Celsius to degrees Fahrenheit.",
        "celsius_to_fahrenheit(100)==212 and celsius_to_fahrenheit(0)==32",
    ),
    (
        "def bubble_sort(numbers):",
        "Return a sorted copy of the list, by bubble sort.",
        "bubble_sort([3,1,2])==[1,2,3] and bubble_sort([])==[]",
    ),
    (
        "def binary_search(items, x):",
        "Return the index of x in the sorted list items, or -1.",
        "binary_search([1,3,5,7],5)==2 and binary_search([1,3],4)==-1",
    ),
    (
        "def sum_of_digits(n):",
        "Return the sum of the decimal digits of a non-negative integer.",
        "sum_of_digits(1234)==10 and sum_of_digits(0)==0",
    ),
    (
        "def merge_sorted(a, b):",
        "Merge two sorted lists into one sorted list.",
        "merge_sorted([1,4],[2,3,5])==[1,2,3,4,5]",
    ),
    (
        "def transpose(matrix):",
        "Return the transpose of a matrix given as a list of rows.",
        "[list(r) for r in transpose([[1,2,3],[4,5,6]])]==[[1,4],[2,5],[3,6]]",
    ),
    (
        "def caesar(text, shift):",
        "Shift each lower-case letter of text by shift places in the alphabet; keep other characters.",
        "caesar('abc z',1)=='bcd a'",
    ),
    (
        "def power(base, exponent):",
        "Return base to the power of a non-negative integer exponent.",
        "power(2,10)==1024 and power(5,0)==1",
    ),
    (
        "def second_largest(numbers):",
        "Return the second largest distinct number of a list.",
        "second_largest([1,5,3,5])==3",
    ),
    (
        "def to_binary(n):",
        "Return the binary digits of a non-negative integer as a string, without a prefix.",
        "to_binary(10)=='1010' and to_binary(0)=='0'",
    ),
    (
        "def common_elements(a, b):",
        "Return a sorted list of the elements that are in both lists.",
        "common_elements([3,1,2],[2,3,4])==[2,3]",
    ),
    ("def average(numbers):", "Return the mean of a non-empty list of numbers.", "average([1,2,3])==2"),
    ("def count_occurrences(items, x):", "Return how many times x occurs in items.", "count_occurrences([1,2,1],1)==2"),
    (
        "def remove_negative(numbers):",
        "Return the numbers that are not negative.",
        "remove_negative([1,-2,0,3])==[1,0,3]",
    ),
    (
        "def title_case(s):",
        "Return s with the first letter of each word in upper case.",
        "title_case('hello big world')=='Hello Big World'",
    ),
    ("def longest_word(words):", "Return the longest of the words.", "longest_word(['a','abc','ab'])=='abc'"),
    ("def squares(n):", "Return the squares of 1 to n as a list.", "squares(4)==[1,4,9,16]"),
    ("def dot(a, b):", "Return the dot product of two lists of numbers.", "dot([1,2,3],[4,5,6])==32"),
    (
        "def is_leap_year(year):",
        "Return True if year is a leap year of the Gregorian calendar.",
        "is_leap_year(2000) and is_leap_year(2024) and not is_leap_year(1900) and not is_leap_year(2023)",
    ),
)


@torch.no_grad()
def solved(tokenizer: Any, model: Any, tokens: int = 96, batch: int = 16) -> list[bool]:
    """Whether the model solves each of the tasks."""
    tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.pad_token or tokenizer.eos_token
    found = list[bool]()
    for at in range(0, len(TASKS), batch):
        headers = [f'{header}\n    """{what}"""\n' for header, what, _ in TASKS[at : at + batch]]
        inputs = tokenizer(headers, return_tensors="pt", padding=True)
        ids = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)[:, inputs["input_ids"].shape[1] :]
        completions = tokenizer.batch_decode(ids, skip_special_tokens=True)
        for header, completion, (_, _, condition) in zip(headers, completions, TASKS[at:], strict=False):
            found.append(holds(f"{header}{body_of(completion)}\nassert {condition}"))
    return found


def body_of(completion: str) -> str:
    """The lines of a completion that belong to the function: those before the first one without an indent."""
    lines = completion.split("\n")
    ends = [at for at, line in enumerate(lines) if line.strip() and not line.startswith((" ", "\t"))]
    return "\n".join(lines[: ends[0]] if ends else lines)


def holds(source: str, seconds: float = 5) -> bool:
    """Whether a program ends without an error in this time, in a process of its own."""
    try:
        return not subprocess.run([sys.executable, "-c", source], timeout=seconds, capture_output=True).returncode
    except subprocess.TimeoutExpired:
        return False
