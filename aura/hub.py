"""Reading from the Hub, and Spanish for the errors of its client: their text is English and long, and their types
change with its version."""

import contextlib
import logging
import re

from aura.errors import UserError, one_line

STATUS = {401: "no existe, o pide una cuenta (hf auth login)", 403: "esa cuenta no tiene permiso; pídalo en su página",
          404: "no existe", 429: "son demasiadas peticiones; espere unos minutos"}


def quiet():
    """Keep huggingface_hub from telling of each attempt: reason() tells of the last."""
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()


def _in_spanish(record):
    """A filter of a logger of datasets', which tells in English of each attempt to go on with a file."""
    if attempt := re.search(r"Retrying in (\d+)sec \[(\d+)/(\d+)\]", record.getMessage()):
        seconds, number, limit = attempt.groups()
        record.msg, record.args = (f"Aviso: el Hub no responde, o ha cortado la conexión; nuevo intento en {seconds} s "
                                   f"({number} de {limit})."), ()
    return True


def reason(problem):
    """A Spanish phrase for why something did not come from the Hub, with the client's words where they alone know."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    chain = [problem]
    while (before := chain[-1].__cause__ or chain[-1].__context__) and before not in chain:
        chain.append(before)
    for each in chain:
        if status := getattr(getattr(each, "response", None), "status_code", None):
            why = STATUS.get(status, "falla ahora; inténtelo más tarde" if status >= 500 else "no lo da")
            return f"el Hub responde {status} a {each.response.url}: {why}"
    if any(isinstance(each, ConnectionError | TimeoutError | LocalEntryNotFoundError) for each in chain):
        return "no se pudo conectar con el Hub"
    return one_line(problem, 240)  # which configurations there are comes after the first line


@contextlib.contextmanager
def reading(repository, what, instead):
    """The package datasets, for a block that reads `repository`: its failures become UserErrors. what, instead: Spanish
    for what is read, and for the file that would do as well."""
    try:
        import datasets
    except ImportError as problem:
        raise UserError(f"para leer {what} de Hugging Face falta el paquete «datasets»: instálelo con "
                        f"`pip install datasets`, o dé la ruta de {instead}") from problem
    datasets.disable_progress_bars()
    logging.getLogger("datasets.utils.file_utils").addFilter(_in_spanish)
    quiet()
    try:
        yield datasets
    except UserError:
        raise
    except Exception as problem:  # datasets and its HTTP client raise types that change from version to version
        raise UserError(f"no se puede leer {repository!r} de Hugging Face ({reason(problem)}): "
                        "compruebe el nombre (propietario/nombre o propietario/nombre:configuración) y la conexión, o "
                        f"dé la ruta de {instead}") from problem
