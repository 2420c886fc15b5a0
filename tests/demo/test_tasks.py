from itertools import islice

from deploy.demo.tasks import ITEMS, PRICES, answer, question, tasks


def test_a_seed_gives_the_same_tasks_and_another_seed_others():
    first, again, other = (list(islice(tasks(seed), 50)) for seed in (1, 1, 2))
    assert first == again
    assert [task.asked for task in first] != [task.asked for task in other]


def test_the_example_never_gives_the_question_away():
    for task in islice(tasks(0), 500):
        assert task.asked.item != task.example.item
        assert {task.asked.item, task.example.item} <= set(ITEMS)
        assert task.asked.price in PRICES


def test_an_item_has_no_fixed_price():
    prices: dict[str, set[int]] = {}
    for task in islice(tasks(0), 500):
        prices.setdefault(task.asked.item, set()).add(task.asked.price)
    assert sum(len(seen) > 1 for seen in prices.values()) > len(ITEMS) / 2


def test_task_names_are_unique_and_fit_into_a_run_id():
    names = [task.name for task in islice(tasks(3), 200)]
    assert len(set(names)) == 200
    assert all(name.replace("-", "").isalnum() for name in names)


def test_the_words_fit_their_articles():
    assert not [item for item in ITEMS if item[0] in "aeiou"]
    assert len(set(ITEMS)) == len(ITEMS)
    assert question("piano") == "How much is a piano?"
    assert answer(next(tasks(0)).asked).endswith(" coins.")
