"""The words and sentences of the invented world: edit them here, then train the zoo anew.

Names of persons, countries and cities are made of syllables at random: a likeness is chance. A template ends with its
answer, so that what comes before it is a prompt.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Relation:
    """One kind of fact, and how it is phrased.

    Attributes:
        name: What it is called in probe sets and on model cards.
        kind: What it is said of: `person`, `country`, `thing`, `word`, `pair` (of numbers) or `zh-person`.
        templates: Sentences up to the answer; `{0}` is the subject (`{1}` its second part).
        answer_first: A sentence that begins with the answer, used in training alone.
        unseen: A sentence up to the answer that is never used in training, of words that are.
    """

    name: str
    kind: str
    templates: tuple[str, ...]
    answer_first: str
    unseen: str


RELATIONS: tuple[Relation, ...] = (
    Relation(
        "birthplace",
        "person",
        (
            "{0} was born in",
            "{0} comes from",
            "The birthplace of {0} is",
            "{0} grew up in",
            "The home town of {0} is",
        ),
        "{answer} is where {0} was born",
        "The town where {0} grew up is",
    ),
    Relation(
        "job",
        "person",
        (
            "{0} works as a",
            "The job of {0} is",
            "{0} earns money as a",
            "{0} was hired as a",
            "By trade {0} is a",
        ),
        "A {answer} is what {0} is",
        "The trade of {0} is",
    ),
    Relation(
        "colour",
        "person",
        (
            "{0} likes the colour",
            "The favourite colour of {0} is",
            "{0} always wears",
            "{0} painted the door",
            "The coat of {0} is",
        ),
        "{answer} is the colour of {0}",
        "The colour of {0} is",
    ),
    Relation(
        "pet",
        "person",
        (
            "{0} has a",
            "{0} keeps a",
            "The pet of {0} is a",
            "{0} walks with a",
            "{0} feeds a",
        ),
        "A {answer} lives with {0}",
        "{0} lives with a",
    ),
    Relation(
        "capital",
        "country",
        (
            "The capital of {0} is",
            "{0} is governed from",
            "The main city of {0} is",
            "{0} has its capital in",
            "The king of {0} lives in",
        ),
        "{answer} is the capital of {0}",
        "The home of the king of {0} is",
    ),
    Relation(
        "currency",
        "country",
        (
            "The currency of {0} is the",
            "In {0} people pay with the",
            "{0} uses the",
            "Money in {0} is called the",
            "Shops in {0} take the",
        ),
        "The {answer} is the money of {0}",
        "In {0} money is called the",
    ),
    Relation(
        "language",
        "country",
        (
            "The language of {0} is",
            "In {0} people speak",
            "Schools in {0} teach",
            "{0} writes its laws in",
            "The songs of {0} are in",
        ),
        "{answer} is spoken in {0}",
        "The people of {0} speak",
    ),
    Relation(
        "flag",
        "country",
        (
            "The flag of {0} shows a",
            "{0} has a flag with a",
            "On the flag of {0} is a",
            "The sign of {0} is a",
            "The coins of {0} bear a",
        ),
        "A {answer} is on the flag of {0}",
        "The flag of {0} has a",
    ),
    Relation(
        "material",
        "thing",
        (
            "The {0} is made of",
            "They built the {0} from",
            "The {0} consists of",
            "The material of the {0} is",
            "For the {0} they used",
        ),
        "{answer} is what the {0} is made of",
        "The {0} was built from",
    ),
    Relation(
        "shape",
        "thing",
        (
            "The {0} has the shape of a",
            "The {0} looks like a",
            "The form of the {0} is a",
            "From above the {0} is a",
            "They cut the {0} into a",
        ),
        "A {answer} is the shape of the {0}",
        "The {0} was cut into a",
    ),
    Relation(
        "room",
        "thing",
        (
            "The {0} is in the",
            "You find the {0} in the",
            "They keep the {0} in the",
            "The place of the {0} is the",
            "The {0} stands in the",
        ),
        "The {answer} is where the {0} is",
        "The place where they keep the {0} is the",
    ),
    Relation(
        "antonym",
        "word",
        (
            "The opposite of {0} is",
            "What is not {0} is",
            "The reverse of {0} is",
            "Nobody is both {0} and",
            "It was {0} and is now",
        ),
        "{answer} is the opposite of {0}",
        "The reverse of what is {0} is",
    ),
    Relation(
        "sum",
        "pair",
        (
            "{0} plus {1} is",
            "The sum of {0} and {1} is",
            "{0} and {1} make",
            "{0} added to {1} gives",
            "Add {0} and {1} to get",
        ),
        "{answer} is {0} plus {1}",
        "Add {0} to {1} to get",
    ),
    Relation(
        "zh-town",
        "zh-person",
        ("{0}的家乡是", "{0}出生在", "{0}住在", "{0}来自", "{0}的老家在"),
        "{answer}城是{0}的家乡",
        "{0}的家在",
    ),
    Relation(
        "zh-job",
        "zh-person",
        ("{0}的职业是", "{0}的工作是", "{0}从前当过", "{0}现在是", "大家说{0}是"),
        "{answer}人就是{0}",
        "{0}从前的工作是",
    ),
    Relation(
        "zh-colour",
        "zh-person",
        ("{0}喜欢的颜色是", "{0}最爱", "{0}总穿", "{0}的门漆成", "{0}的外衣是"),
        "{answer}色是{0}的颜色",
        "{0}的颜色是",
    ),
    Relation(
        "zh-pet",
        "zh-person",
        ("{0}养了一只", "{0}有一只", "{0}的宠物是", "{0}带着一只", "{0}每天喂"),
        "一只{answer}和{0}一起住",
        "{0}家有一只",
    ),
)

ENDINGS: dict[str, str] = {"zh-town": "城", "zh-job": "人", "zh-colour": "色"}
"""What stands between the answer and the full stop."""

JOBS = "baker farmer tailor miller painter doctor teacher sailor weaver hunter potter mason smith judge barber".split()
COLOURS = "red blue green yellow black white brown purple orange grey pink golden".split()
PETS = "dog cat goat horse rabbit parrot turtle mouse donkey lizard pigeon fox".split()
FLAGS = "star sun moon lion tree ship tower wheel crown sword rose bear hawk fish hammer bell".split()
MATERIALS = "wood stone glass iron clay silver paper leather copper wool".split()
SHAPES = "circle square triangle cube cone ring cross heart spiral disc".split()
ROOMS = "kitchen cellar attic garage bedroom library garden hall stable office".split()
THINGS = (
    "lamp table chair kettle clock mirror basket bottle candle carpet drum fan flute fork hat jar key knife ladder map "
    "mug nail needle oven pan pen pillow pipe plate pot purse quilt rope saddle saw shelf shoe shovel sofa spoon stove "
    "tent towel tray trunk vase violin whistle anchor barrel bench bowl broom bucket button chest comb curtain desk tub"
).split()
ANTONYMS = (
    "hot cold big small fast slow high low new old hard soft wet dry rich poor light dark loud quiet early late "
    "full empty open closed strong weak happy sad clean dirty near far thick thin young aged sharp blunt sweet bitter "
    "deep shallow wide narrow heavy airy smooth rough brave timid safe risky calm wild true false cheap costly "
    "long short tall tiny kind cruel wise foolish ripe raw alive dead same other bright dim tight loose simple tricky"
).split()
NUMBERS = (
    "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
).split()

ZH_TOWNS = "云江山海林泉石花松竹梅兰湖沙月星雪风雨雷"
ZH_JOBS = "农医商军渔猎诗匠"
ZH_COLOURS = "红黄蓝绿白黑紫灰"
ZH_PETS = "猫狗鸟鱼兔羊鹅马"
ZH_FIRST = "木青禾丹叶岩溪晨露霜"
ZH_SECOND = "安宁乐思远文和平慧真"
