"""A data set that the processes of a dataloader import in a moment."""


class Rows(list):
    def collate_fn(self, items):
        return list(items)


def rows(count, text="What is"):
    return Rows({"prompt": [{"role": "user", "content": f"{text} {i}?"}], "uid": str(i)} for i in range(count))
