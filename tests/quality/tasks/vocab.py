"""The 512 token ids of the token-id tasks: small enough that tiny models serve.

    id        what                     used by
    0         EOS (end, padding)       all
    1         BOS                      all
    2         PERIOD (ends a sentence) all
    3         NEEDLE  k k v v          needle families
    4         ASK     k k -> v v       needle families
    5         LET     v v x            variable tracking: value v v is put in x
    6         COPY    x y              variable tracking: x is copied to y
    7         TRACE   v v -> x y ...   variable tracking
    8         LIST                     common words: header of the list
    9         COMMON  -> w w ...       common words: question
    10        CODED                    frequent words: header of the coded text
    11        FREQUENT -> w w w        frequent words: question
    12        DOC     k k              question answering: a document about entity k k
    13        QUESTION k k r -> v v    question answering
    14-31     reserved
    32-95     KEYS (64), two make a key or the name of an entity: 4096 of them
    96-159    VALUES (64), two make a value: 4096 of them
    160-223   VARIABLES (64)
    224-231   RELATIONS (8), each opens a fact r v v inside a document
    232-295   WORDS (64)
    296-511   FILLER (216), the prose of the haystack
"""

SIZE = 512

EOS, BOS, PERIOD = 0, 1, 2
NEEDLE, ASK = 3, 4
LET, COPY, TRACE = 5, 6, 7
LIST, COMMON = 8, 9
CODED, FREQUENT = 10, 11
DOC, QUESTION = 12, 13

KEYS = range(32, 96)
VALUES = range(96, 160)
VARIABLES = range(160, 224)
RELATIONS = range(224, 232)
WORDS = range(232, 296)
FILLER = range(296, 512)
