"""Spanish that depends on how many there are, sizes and durations."""


def counted(number, noun):
    """'1 paso' or '3 pasos'. noun: one that ends in a vowel."""
    return f"{number} {noun}{'s' * (number != 1)}"


def listed(items):
    """'a', 'a y b' or 'a, b y c'."""
    *first, last = items
    return f"{', '.join(first)} y {last}" if first else last


def first_of(names, most):
    """'a, b, c y 2 más': at most so many of some names."""
    return listed([*names[:most], *([f"{len(names) - most} más"] if len(names) > most else [])])


def amount(count):
    """'2.07 GB', '4.50 MB' or '75 kB': a number of bytes in units of 1000."""
    for bytes_of_one, unit in ((1e9, "GB"), (1e6, "MB")):
        if count >= bytes_of_one:
            return f"{count / bytes_of_one:.2f} {unit}"
    return f"{count / 1e3:.0f} kB"


def span(seconds):
    """'4.2 ms', '0.84 s', '41 s', '12 min', '3.5 h': a duration with the figures that matter."""
    if seconds < 0.0995:
        return f"{1000 * seconds:.{1 if seconds < 0.00995 else 0}f} ms"
    return f"{seconds:.2f} s" if seconds < 9.95 else ago(seconds)


def ago(seconds):
    """'8 s', '12 min', '3.5 h': how long ago something was."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def duration(seconds):
    """'2 h 05 min', '3 min 20 s' or '45 s', for a number of seconds."""
    seconds = round(seconds)
    if seconds >= 3600:
        return f"{seconds // 3600} h {seconds % 3600 // 60:02d} min"
    if seconds >= 60:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    return f"{seconds} s"
