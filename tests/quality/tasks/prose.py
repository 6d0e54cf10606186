"""English for the text tasks, made here: sentences of filler, and pools of names to ask for."""

_ADJECTIVES = """amber ancient brisk broken calm careful clever cold crimson curious distant eager
early faint gentle golden grand grey hidden hollow humble idle keen little lively lonely narrow
noble old pale patient plain proud quiet rapid rough rusty silent silver slender small solid steady
strange sturdy sudden tall tender tidy timid vivid warm weary wide wild wise wooden young""".split()
_NOUNS = """anchor apple barn basket beacon bell boat bottle bridge candle carpet castle clock cloud
coat compass crane crown desert door drum engine farmer feather ferry field forest fountain garden
gate glacier hammer harbor hill horse island kettle ladder lantern letter library lion map market
meadow mill mirror mountain needle oven owl painter path pencil piano planet pond portrait river
road robin sailor shepherd ship stone tailor tower train valley violin wagon well whale window
winter workshop""".split()
_VERBS = """admires avoids behind borrows carries circles crosses describes draws faces finds
follows guards hears holds keeps lifts likes mends misses needs notices paints passes praises
reaches remembers sees shows sketches sells shelters studies trusts visits watches""".split()
_VERBS.remove("behind")
_PLACES = """by the water|after the rain|before noon|in the old town|near the coast|under a clear
sky|without a word|on most days|at the end of the road|when the wind turns|for no clear reason|as
the neighbours say|in spite of the snow|with great patience""".replace("\n", " ").split("|")

RELATIONS = ("profession", "birthplace", "favourite dish", "registration code")

KEYS = tuple(f"{a}-{n}" for a in _ADJECTIVES for n in _NOUNS)
NOUNS = tuple(_NOUNS)
_ONSETS, _RIMES = "b d f g k l m n p r s t v z".split(), "a e i o u an el im or us".split()
_SYLLABLES = tuple(onset + rime for onset in _ONSETS for rime in _RIMES)


def pick(rng, pool, count):
    """`count` different members of a pool."""
    return [pool[i] for i in rng.permutation(len(pool))[:count]]


def numbers(rng, count):
    """Different 7-digit numbers, as text."""
    found = {}
    while len(found) < count:
        found[str(int(rng.integers(1_000_000, 10_000_000)))] = None
    return list(found)


def names(rng, count):
    """Different invented words of three syllables, which no vocabulary holds."""
    found = {}
    while len(found) < count:
        found["".join(_SYLLABLES[i] for i in rng.integers(0, len(_SYLLABLES), 3))] = None
    return list(found)


def sentences(rng, count):
    """`count` sentences of filler."""
    pools = (_ADJECTIVES, _NOUNS, _VERBS, _ADJECTIVES, _NOUNS, _PLACES)
    picks = [rng.integers(0, len(pool), size=count) for pool in pools]
    return ["The {} {} {} the {} {} {}.".format(*(pool[i] for pool, i in zip(pools, row)))
            for row in zip(*picks)]
