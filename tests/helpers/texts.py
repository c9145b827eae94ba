"""Real text to cut prompts from: prose, code, other languages, and lists with figures."""

# ruff: noqa: RUF001 - other languages have letters that look like ours

from __future__ import annotations

PROSE = """\
The lighthouse keeper had been told, when he took the post, that nobody would come between October and March, and \
for eleven winters nobody had. He kept a ledger of the weather in a hand so small that the inspector, who came each \
April with the supply boat, needed a glass to read it. Wind from the north-west, force seven. Wind from the \
north-west, force eight. Fog until noon. On the first page of every new ledger he wrote the same sentence: the lamp \
was lit at dusk and put out at dawn. He believed that this was all anyone needed to know about him.

In the twelfth winter, on a night with no wind at all, someone knocked. He stood on the stairs with a cloth in one \
hand and a jar of oil in the other and waited for the knock to turn out to be a shutter, or a gull, or his own \
heart. It came again. When he opened the door there was a girl of perhaps fourteen in a coat that was far too large \
for her, and behind her, drawn up on the shingle, a rowing boat with one oar. She asked whether this was the \
mainland. He said that it was not. She looked past him, up the white curve of the stairs, and asked what the light \
was for if it did not mean land.

He thought about this for a long time afterwards. He gave her soup and a blanket and the chair beside the stove, and \
because she did not seem inclined to sleep he explained the lamp to her: how the lens was ground in a town that \
neither of them would ever see, how each ring of glass bent the light a little more than the ring inside it, so that \
a flame no bigger than a thumb could be seen from nineteen miles away. A light does not mean land, he said. It means \
that someone is awake. She considered the answer as if it were a coin she had been handed in a foreign shop. Then \
she asked how far it was to the mainland in a boat with one oar, and he said that it depended on the tide, and that \
the tide would not be right until morning, and that in the morning there would be wind.

There was no wind in the morning. The sea lay flat and grey as a slate that has been wiped with a wet sleeve. He had \
carved a second oar in the night out of the spare door, and it was not a good oar, but it was the same length as the \
first. She rowed out past the rocks without once looking at him, which is how rowing is done, facing backwards, so \
that in fact she looked at him the whole time and it was he who did not know what to do with his face. He raised a \
hand. When she was a mark no larger than a fly on the glass he went in and opened the ledger. Calm, he wrote. \
Visibility good. Then, since there was room on the line, he added that the lamp had been seen.

An essay on method should begin with an apology, since nobody who has a method writes essays about it. Mine is \
short. I have spent thirty years measuring how water moves through sand, and what I have learned is that the water \
knows nothing of my equations. It goes where the pressure is lower. Between two grains there is a gap, and the water \
either passes or does not; multiply that by ten to the twelfth and you have a river bank. The equations describe the \
sum and are silent on the grains, and for most purposes the sum is all that we want. But now and then a bank \
collapses that the sum had called safe, and when we dig we always find the same thing: a layer no thicker than a \
finger, laid down in a single flood some thousands of years ago, in which every grain happened to be the same size. \
The average had swallowed it whole.
"""

CODE = '''\
import heapq
from collections import defaultdict
from dataclasses import dataclass, field


@dataclass(order=True)
class Event:
    time: float
    sequence: int
    name: str = field(compare=False)
    payload: dict = field(compare=False, default_factory=dict)


class Simulator:
    """A small discrete event simulator with a priority queue."""

    def __init__(self, seed: int = 0) -> None:
        self.now = 0.0
        self._queue: list[Event] = []
        self._handlers = defaultdict(list)
        self._sequence = 0

    def on(self, name, handler):
        self._handlers[name].append(handler)
        return handler

    def schedule(self, delay, name, **payload):
        if delay < 0:
            raise ValueError(f"cannot schedule {delay} seconds in the past")
        self._sequence += 1
        heapq.heappush(self._queue, Event(self.now + delay, self._sequence, name, payload))

    def run(self, until=float("inf")):
        while self._queue and self._queue[0].time <= until:
            event = heapq.heappop(self._queue)
            self.now = event.time
            for handler in self._handlers[event.name]:
                handler(self, **event.payload)
        return self.now


def fibonacci(n):
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a


def quicksort(items):
    if len(items) <= 1:
        return items
    pivot = items[len(items) // 2]
    left = [x for x in items if x < pivot]
    middle = [x for x in items if x == pivot]
    right = [x for x in items if x > pivot]
    return quicksort(left) + middle + quicksort(right)


#include <stdio.h>
#include <stdlib.h>

static int compare(const void *a, const void *b) {
    const int x = *(const int *)a, y = *(const int *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv) {
    int *values = malloc((argc - 1) * sizeof *values);
    for (int i = 1; i < argc; i++) {
        values[i - 1] = atoi(argv[i]);
    }
    qsort(values, argc - 1, sizeof *values, compare);
    for (int i = 0; i < argc - 1; i++) {
        printf("%d%c", values[i], i == argc - 2 ? '\\n' : ' ');
    }
    free(values);
    return 0;
}

SELECT customers.name, COUNT(orders.id) AS order_count, SUM(orders.total) AS revenue
FROM customers
LEFT JOIN orders ON orders.customer_id = customers.id
WHERE orders.created_at >= '2024-01-01'
GROUP BY customers.name
HAVING SUM(orders.total) > 1000
ORDER BY revenue DESC
LIMIT 10;

async function fetchAll(urls, limit = 4) {
  const results = new Array(urls.length);
  let next = 0;
  async function worker() {
    while (next < urls.length) {
      const index = next++;
      const response = await fetch(urls[index]);
      results[index] = response.ok ? await response.json() : null;
    }
  }
  await Promise.all(Array.from({ length: limit }, worker));
  return results;
}
'''

LANGUAGES = """\
Der Zug nach Norden fährt heute von Gleis sieben ab, und wer nach Lübeck möchte, steige bitte in die vorderen Wagen \
ein. Die Straße war naß, die Bäume standen schwarz gegen den Himmel, und über dem Fluß hing ein dünner Nebel.

Il était une fois, dans une petite ville au bord de la mer, un horloger qui ne savait jamais quelle heure il était. \
Ses voisins venaient le voir chaque matin pour régler leurs montres, et chaque matin il leur répondait en souriant.

El tren llegó con tres horas de retraso y nadie se quejó. ¿Quién iba a quejarse? El mar estaba en calma, el café era \
bueno, y la niña del vestido azul contaba gaviotas: una, dos, tres, cuatro, cinco.

Жил-был старик со своею старухой у самого синего моря. Каждое утро он выходил на берег и смотрел на воду, а потом \
возвращался домой и молча пил чай.

春天来了，河边的柳树发出了新芽。老人坐在桥上，看着孩子们放风筝。他想起了自己小时候的事情。

吾輩は駅前の古い本屋で働いている。客は少ないが、雨の日になると不思議と人が増える。

كان الليل هادئا والقمر يضيء الطريق الطويل بين الجبال.

봄이 오면 강가의 버드나무에 새싹이 돋는다. 아이들은 연을 날린다.

A few symbols for good measure: ∀x ∈ ℝ, ∃y > 0: |x − y| ≤ ε ⇒ f(x) ≈ f(y) ± δ. Emoji: 🙂 🚀 👩‍🚀 🇫🇷 ❤️ 日本 ✓.
"""

LISTS = """\
Shopping list for the expedition, revised on 14 March 2026:
1. Rope, 120 metres, 9.8 mm
2. Biscuits, 48 packets (not the ones from last year)
3. Stove, fuel for 21 days at 0.35 litres a day
4. Maps: sheet 1041, sheet 1042, sheet 1043
5. Batteries, AA, 64 pieces

| station | altitude (m) | temperature | pressure |
|---------|--------------|-------------|----------|
| Harbour | 3            | 11.4        | 1013.2   |
| Farm    | 287          | 9.1         | 979.8    |
| Hut     | 1,655        | -2.0        | 829.4    |
| Summit  | 2,914        | -9.7        | 706.0    |

Question: A train leaves the harbour at 07:15 and climbs to the farm in 25 minutes. It waits there for 8 minutes. \
The cable car to the hut takes 19 minutes. When do the passengers arrive at the hut?
Answer: 07:15 plus 25 minutes is 07:40. Plus 8 minutes is 07:48. Plus 19 minutes is 08:07.

Question: What is the capital of Australia?
Answer: Canberra.

Question: Name three primes between 100 and 110.
Answer: 101, 103 and 107.

From: Margarethe
To: The whole team
Subject: Re: Re: Fwd: the door code

Dear all,

the code is no longer 4711. Please do not write the new one on the wall. The plumber will come on Thursday between \
nine and twelve; somebody has to be there who knows where the main tap is (Piet does). Cake is in the kitchen.

Best wishes,
Margarethe

{"name": "hut", "beds": 34, "open": ["June", "July", "August"], "price": {"member": 18.5, "guest": 31.0}, "dogs": false}
"""

ALL = (PROSE, CODE, LANGUAGES, LISTS)
