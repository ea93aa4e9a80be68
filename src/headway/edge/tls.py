"""The certificate of a server that speaks TLS, read before anything is loaded."""

import ssl
from pathlib import Path

from headway.core.errors import UsageError


def check_files(certfile: str, keyfile: str) -> None:
    """Raise UsageError where TLS is asked for and its two files cannot be used."""
    files = {"--ssl-certfile": certfile, "--ssl-keyfile": keyfile}
    given = [name for name, file in files.items() if file]
    if not given:
        return
    if len(given) == 1:
        (missing,) = set(files) - set(given)
        raise UsageError(f"{given[0]} is given without {missing}.", "TLS needs both files, as PEM.")
    for name, file in files.items():
        try:
            Path(file).read_bytes()
        except OSError as error:
            raise UsageError(
                f"{name} {file}: {error.strerror}.", "Give a PEM file that this user may read."
            ) from error
    check_pair(certfile, keyfile)


def check_pair(certfile: str, keyfile: str) -> None:
    """Raise UsageError unless the one holds a certificate and the other its key."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile, refuse_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise UsageError(
                f"--ssl-keyfile {keyfile} is not the key of --ssl-certfile {certfile}.",
                "Give the private key that the certificate was made with.",
            ) from error
        raise UsageError(
            f"--ssl-certfile {certfile} and --ssl-keyfile {keyfile} cannot be read as PEM.",
            "The first holds the certificate and its chain, the second its private key.",
        ) from error


def refuse_password() -> str:
    """Called for the password of a key that has one; raises UsageError."""
    raise UsageError(
        "--ssl-keyfile is encrypted with a password.",
        "Write it without one: openssl pkey -in KEY.pem -out PLAIN.pem",
    )
