"""The invented names, places and products of the order desk.

Databases of the splits "train" and "held-out" share no name, street or city, and no id (see database). Most products
occur in only one split.
"""

from __future__ import annotations

from dataclasses import dataclass

Product = tuple[str, int, tuple[str, str, str]]
"""Name, price in cents, and three options."""


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The words for the databases of one split."""

    first_names: tuple[str, ...]
    last_names: tuple[str, ...]
    streets: tuple[str, ...]
    cities: tuple[str, ...]
    mail_hosts: tuple[str, ...]
    products: tuple[Product, ...]


CARRIERS = ("Swift Parcel", "BlueLine", "Northern Post")
PAYMENT_METHODS = ("credit card", "gift card", "bank transfer")

_IN_BOTH: tuple[Product, ...] = (
    ("desk lamp", 3990, ("black", "white", "brass")),
    ("office chair", 18900, ("grey", "black", "blue")),
    ("water bottle", 1850, ("red", "green", "steel")),
    ("rain jacket", 8900, ("small", "medium", "large")),
    ("wool blanket", 5400, ("cream", "navy", "rust")),
    ("backpack", 7650, ("olive", "black", "blue")),
    ("running shoes", 10950, ("size 39", "size 41", "size 43")),
    ("bookshelf", 15900, ("oak", "white", "black")),
    ("alarm clock", 2480, ("white", "black", "mint")),
    ("frying pan", 4990, ("20 cm", "24 cm", "28 cm")),
)
_HELD_OUT: tuple[Product, ...] = (
    ("hiking boots", 12950, ("size 40", "size 42", "size 44")),
    ("coffee grinder", 6490, ("black", "red", "silver")),
    ("headphones", 14900, ("white", "black", "sand")),
    ("tea kettle", 4475, ("copper", "white", "green")),
    ("bath towel", 2290, ("white", "teal", "grey")),
    ("picture frame", 1640, ("oak", "black", "walnut")),
    ("bicycle helmet", 6900, ("small", "medium", "large")),
    ("garden hose", 3380, ("10 m", "20 m", "30 m")),
    ("yoga mat", 2995, ("purple", "blue", "grey")),
    ("winter gloves", 3150, ("small", "medium", "large")),
)
_TRAIN: tuple[Product, ...] = (
    ("table fan", 4250, ("white", "black", "silver")),
    ("toaster", 3760, ("red", "black", "cream")),
    ("leather belt", 3570, ("85 cm", "95 cm", "105 cm")),
    ("umbrella", 2130, ("yellow", "navy", "black")),
    ("sleeping bag", 9720, ("short", "regular", "long")),
    ("kitchen scale", 2670, ("white", "steel", "red")),
    ("wall mirror", 8460, ("round", "oval", "square")),
    ("tool box", 5890, ("small", "medium", "large")),
    ("denim jacket", 9360, ("S", "M", "XL")),
    ("rubber boots", 4830, ("size 37", "size 38", "size 46")),
    ("guitar strings", 1490, ("light", "medium", "heavy")),
    ("fountain pen", 5620, ("fine", "medium", "broad")),
    ("bird feeder", 1980, ("cedar", "green", "copper")),
    ("bed sheet", 4170, ("white", "sage", "lilac")),
    ("phone case", 1890, ("clear", "black", "violet")),
)

HELD_OUT = Catalogue(
    # A customer's names come from even positions only or from odd ones only (see database._customers), so that the two
    # request sets share no name.
    first_names=(
        *("Ada", "Bruno", "Carla", "Dario", "Edith", "Felix", "Greta", "Hugo", "Irena", "Jonas"),
        *("Katja", "Leon", "Mira", "Nils", "Olga", "Pavel", "Quinn", "Rosa", "Stefan", "Tilda"),
        *("Ulrich", "Vera", "Walter", "Xenia", "Yannick", "Zelda", "Anton", "Bella", "Conrad", "Dora"),
        *("Emil", "Flora", "Gideon", "Hanna", "Igor", "Judith", "Karl", "Lydia", "Martin", "Nadia"),
    ),
    last_names=(
        *("Abbott", "Berger", "Castle", "Dunn", "Ellery", "Fischer", "Grant", "Holm", "Iversen", "Jansen"),
        *("Keller", "Lindqvist", "Marsh", "Novak", "Orlov", "Parker", "Quist", "Rowan", "Sommer", "Tanner"),
        *("Ulmer", "Vance", "Weber", "Yates", "Zeller", "Archer", "Baxter", "Conway", "Dalton", "Everett"),
        *("Forbes", "Gallo", "Harper", "Ingram", "Joyner", "Kemp", "Lowell", "Mercer", "Nolan", "Osborn"),
    ),
    streets=(
        *("Mill Lane", "Oak Street", "Harbour Road", "Station Street", "Elm Avenue", "Church Hill", "Park Row"),
        *("Bridge Street", "Garden Walk", "Market Square", "Cedar Close", "Quarry Road", "Lake View", "North Gate"),
    ),
    cities=(
        *("Norwick", "Eastbrook", "Halden", "Millford", "Stonebury", "Kingsport", "Rivermouth", "Ashby"),
        *("Greenvale", "Westhaven", "Larkfield", "Redhill", "Dunmore", "Fairview", "Oxley", "Brightwater"),
    ),
    mail_hosts=("example.com", "lettermail.example", "harbour.example"),
    products=(*_IN_BOTH, *_HELD_OUT),
)

TRAIN = Catalogue(
    first_names=(
        *("Alice", "Amir", "Amelia", "Arthur", "Astrid", "Axel", "Beatrice", "Ben", "Bianca", "Boris", "Bridget"),
        *("Caleb", "Camille", "Carlos", "Cecilia", "Chloe", "Clara", "Colin", "Daisy", "Daniel", "Daphne", "David"),
        *("Deepak", "Diana", "Dominic", "Edgar", "Elena", "Eli", "Eloise", "Emma", "Erik", "Esther", "Ethan"),
        *("Eva", "Fatima", "Fiona", "Frank", "Freya", "Gabriel", "George", "Gloria", "Grace", "Hannah", "Harry"),
        *("Hector", "Heidi", "Helen", "Henry", "Ian", "Ida", "Ingrid", "Isaac", "Ivan", "Jack", "Jasmine", "Joan"),
        *("Joel", "Julia", "Kai", "Kate", "Kenji", "Kofi", "Lara", "Lena", "Liam", "Lina", "Louis", "Lucas"),
        *("Luna", "Mabel", "Marco", "Maria", "Maya", "Megan", "Miguel", "Mona", "Naomi", "Nathan", "Nina", "Noah"),
    ),
    last_names=(
        *("Adams", "Aldridge", "Alvarez", "Andersen", "Arnold", "Bailey", "Barker", "Bauer", "Becker", "Bell"),
        *("Bennett", "Bishop", "Blake", "Bolton", "Bradley", "Brandt", "Brook", "Burns", "Carter", "Chan", "Clark"),
        *("Coleman", "Cook", "Costa", "Craig", "Cruz", "Curtis", "Davies", "Diaz", "Dixon", "Doyle", "Eaton"),
        *("Edwards", "Ellis", "Farrell", "Ferrari", "Finch", "Fleming", "Flores", "Foster", "Fox", "Garcia"),
        *("Gibson", "Gomez", "Graves", "Gupta", "Haas", "Hale", "Hansen", "Hart", "Hayes", "Hill", "Hoffman"),
        *("Hughes", "Hunt", "Ito", "Jacobs", "James", "Jensen", "Jones", "Khan", "King", "Klein", "Knight"),
        *("Kowalski", "Kumar", "Lam", "Lane", "Larsen", "Lee", "Lopez", "Lund", "Mason", "Mendez", "Meyer"),
    ),
    streets=(
        *("Acorn Drive", "Baker Street", "Beech Road", "Birch Lane", "Broad Street", "Canal Street", "Castle Road"),
        *("Chapel Lane", "Cherry Walk", "Coast Road", "College Street", "Dale Avenue", "Field Lane", "Forest Road"),
        *("Glen Road", "Green Street", "Grove Avenue", "High Street", "Hillside", "Ivy Close", "Juniper Way"),
        *("King Street", "Linden Avenue", "London Road", "Long Lane", "Main Street", "Maple Drive", "Meadow View"),
    ),
    cities=(
        *("Aldbury", "Barrowby", "Bellford", "Bramley", "Bridgeton", "Burnside", "Calder", "Carlow", "Clayton"),
        *("Cliffton", "Colbridge", "Crosby", "Darwick", "Deerfield", "Easton", "Elmwood", "Fernhill", "Foxdale"),
        *("Glenmore", "Grantham", "Hartley", "Haverly", "Hillcrest", "Holbrook", "Kirkby", "Lakewood", "Langford"),
        *("Linton", "Maplewood", "Marlow", "Melrose", "Newbury", "Northam", "Oakham", "Penrose", "Pinehurst"),
    ),
    mail_hosts=(
        *("example.org", "example.net", "mail.example", "post.example", "inbox.example", "webmail.example"),
        *("home.example", "quickmail.example", "letters.example", "cloud.example"),
    ),
    products=(*_IN_BOTH, *_TRAIN),
)

CATALOGUES = {"held-out": HELD_OUT, "train": TRAIN}
