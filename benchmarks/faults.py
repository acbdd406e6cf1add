PHASES = ("initialize", "generate", "forward", "backward", "step", "sync", "save")
HOW = ("killed", "stopped")


def ends_the_run(victim, phase):
    return phase == "initialize" or victim not in ("engine", "sampling")
