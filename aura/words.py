"""Spanish that depends on how many there are."""


def counted(number, noun):
    """'1 paso' or '3 pasos'. noun: one that ends in a vowel."""
    return f"{number} {noun}{'s' * (number != 1)}"


def listed(items):
    """'a', 'a y b' or 'a, b y c'."""
    *first, last = items
    return f"{', '.join(first)} y {last}" if first else last
