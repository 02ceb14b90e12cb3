from __future__ import annotations

from fractions import Fraction

import pytest

from prefrl.errors import ConfigError
from prefrl.rewards import RewardRunner, get_numeric_reward, numeric_reward
from prefrl.rewards.maths import final_number, only_number
from prefrl.rewards.named import reward_by_name


@pytest.mark.parametrize(
    ("text", "value"),
    [
        # where the answer stands
        ("He has 3 + 4 = 7 apples\n#### 7", "7"),
        ("#### 7\nThat is 7 of 10 apples.", "7"),
        ("#### **7**", "7"),
        (r"first \boxed{6}, no: \boxed{7} of 9", "7"),
        (r"#### 6" "\n" r"\boxed{7}", "7"),
        ("<answer> 7 </answer> of 9", "7"),
        ("There were 5, then 7. He has 9 more.", "9"),
        ("<think>maybe 6</think> It is 7.", "7"),
        ("#### Step 2: add 3 and 4\nThe sum is 7.", "7"),
        # how it is written
        ("#### 1,234,567", "1234567"),
        ("#### $1,234.50", "1234.5"),
        ("#### -$5", "-5"),
        ("#### $-5", "-5"),
        ("#### \u22125", "-5"),
        ("it is .5", "1/2"),
        ("It is 5.", "5"),
        ("10-3", "3"),
        ("3/4", "3/4"),
        ("2 1/2 hours", "5/2"),
        ("on day 3 14/2", "7"),
        (r"\boxed{\frac{3}{4}}", "3/4"),
        (r"\boxed{-\dfrac{3}{4}}", "-3/4"),
        (r"\boxed{\frac34}", "3/4"),
        (r"\boxed{2\frac{1}{2}}", "5/2"),
        (r"\boxed{1{,}000}", "1000"),
        (r"\boxed{1\,000}", "1000"),
        (r"\boxed{\$72}", "72"),
        (r"\boxed{72\text{ cm}^2}", "72"),
        (r"\boxed{x = 72}", "72"),
        (r"\boxed{\text{72}}", "72"),
        ("#### 72 apples", "72"),
        ("#### 1e5", "100000"),
        ("#### -2.5E-1.", "-1/4"),
        ("It is 72!", "72"),
        ("#### 72 km/h, as said", "72"),
    ],
)
def test_final_number_is_read(text: str, value: str) -> None:
    number = final_number(text)
    assert number is not None
    assert number.value == Fraction(value)


@pytest.mark.parametrize(
    "text",
    [
        "no number",
        "",
        "#### 1 2 3 4",  # all of them, in the hope that one is right
        r"\boxed{3, 4}",
        r"\boxed{x}, and 7",
        r"\boxed{7",
        "<answer>7",
        r"\boxed{5\pi}",
        r"\boxed{10^5}",
        r"\boxed{\frac{1}{0}}",
        "#### 7,7,7,7",
        "#### 7/1/1",
        "#### 7 / 1 / 1",
        "#### 7!",
        "#### 7x10",
        "#### 7x",
        "#### 7.0.0",
        "#### 7,00",
        "#### 7e0.5",
        "#### 7e0000",
        "#### 7e",
        "on 7/7/2027",
        "<think>it is 7",
        "7" * 5000,  # int() refuses it
    ],
)
def test_what_is_no_single_number_has_no_answer(text: str) -> None:
    assert final_number(text) is None
    assert numeric_reward([text], [7]) == [0.0]


@pytest.mark.parametrize(
    ("gold", "text", "score"),
    [
        ("72", "72", 1.0),
        ("72", "72.0", 1.0),
        ("72", "7", 0.0),
        ("72", "720", 0.0),
        ("5,600", "A: 5600", 1.0),
        ("1/3", r"\boxed{\frac{2}{6}}", 1.0),
        ("1/3", "0.333333", 0.0),
        ("She has 3 and 4.\n#### 7", "7", 1.0),
        ("50%", "50%", 1.0),
        ("50%", "0.5", 1.0),
        ("50", "50%", 1.0),
        ("0.5", "50%", 1.0),
        ("50", "0.5", 0.0),
        ("50%", "0.5%", 0.0),
        (0.1, "0.1", 1.0),
        (72, "72", 1.0),
        (-3, "3", 0.0),
        ("seventy", "70", None),
        ("3 or 4", "3", None),
        (None, "3", None),
        (float("nan"), "3", None),
    ],
)
def test_equal_as_exact_numbers(gold: str | float | None, text: str, score: float | None) -> None:
    assert numeric_reward([text], [gold]) == [score]
    assert numeric_reward(completions=[[{"role": "assistant", "content": text}]], answer=[gold], level=[1]) == [score]


@pytest.mark.parametrize(
    ("gold", "text", "score"),
    [
        ("0.5", "0.6", 1.0),  # a difference of exactly the tolerance, which binary numbers would miss
        ("0.5", "0.4", 1.0),
        ("0.5", "0.61", 0.0),
        ("0.5", "none", 0.0),
        ("1/3", "0.333", 1.0),
        ("50%", "50.2%", 0.0),  # the tolerance is in percent, too
        ("50%", "0.55", 1.0),
        ("half", "0.5", None),
    ],
)
def test_a_number_within_the_tolerance_is_right(gold: str, text: str, score: float | None) -> None:
    assert get_numeric_reward(tolerance=0.1)([text], [gold]) == [score]


def test_the_tolerance_is_a_parameter_of_the_reward() -> None:
    reward = reward_by_name("numeric_reward(tolerance=2)")
    assert [reward(["7"], [answer]) for answer in ("5", "9.5")] == [[1.0], [0.0]]
    assert RewardRunner([numeric_reward, reward]).names == ["numeric_reward", "numeric_reward_2"]
    for wrong in ("-1", "float('nan')", "1e999"):
        with pytest.raises(ConfigError):
            reward_by_name(f"numeric_reward(tolerance={wrong})")


# Solutions that models wrote for GSM8K, with the dataset's own verdict.
GSM8K = [
    ("5,600", "<<1000*4=4000>>4000 and $<<1600+4000=5600>>5600.\nA: 5600", True),
    ("3000", "60 x 50 = $<<60*50=3000>>3,000.\nA: 3,000", True),
    (
        "18",
        "She has 16 - 7 = <<16-7=9>>9 duck eggs for sale\nShe sells them for 2 * 9 = $<<2*9=18>>18 per day\nA: 18",
        True,
    ),
    ("3", "So she needs 2+1 = <<2+1=3>>3.0 bolts of blue and white fiber altogether.\nA: 3", True),
    ("18", "She makes 13 * 2 = $<<13*2=26>>26\nA: 26", False),
    ("4", "The length of each piece is 4 feet / 12 inches/foot = <<4/12=0.3333333333333333>>0." + "3" * 1200, False),
]


@pytest.mark.parametrize(("gold", "solution", "is_correct"), GSM8K)
def test_agrees_with_the_labels_of_gsm8k(gold: str, solution: str, is_correct: bool) -> None:
    assert numeric_reward([solution], [f"Some reasoning about 99 things.\n#### {gold}"]) == [float(is_correct)]


def test_several_equal_numbers_are_one() -> None:
    assert only_number("72 = 72.0") is not None
    assert only_number("72 = 73") is None
