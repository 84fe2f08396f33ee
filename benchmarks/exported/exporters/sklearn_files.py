"""Estimators and pipelines of scikit-learn by skl2onnx; trees of LightGBM, XGBoost and CatBoost."""

import warnings

import files
import numpy as np
import onnx
import onnxmltools
import pandas as pd
import skl2onnx
from files import tensor, words
from onnxmltools.convert.common.data_types import FloatTensorType
from skl2onnx.common.data_types import StringTensorType
from sklearn import (
    calibration,
    cluster,
    compose,
    decomposition,
    discriminant_analysis,
    ensemble,
    feature_extraction,
    gaussian_process,
    impute,
    linear_model,
    mixture,
    naive_bayes,
    neighbors,
    neural_network,
    preprocessing,
    svm,
    tree,
)
from sklearn.pipeline import make_pipeline

warnings.filterwarnings("ignore")
RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((300, 8)).astype(np.float32)
TWO = (X[:, 0] + X[:, 1] * X[:, 2] > 0).astype(int)
THREE = np.digitize(X[:, 0] + X[:, 3], [-0.7, 0.7])
NUMBERS = (X[:, 0] * 2 + np.sin(X[:, 1])).astype(np.float32)
NAMES = np.array(["no", "yes"])[TWO]
PLAIN = {"zipmap": False}
ROWS = tensor("B", 8, draw="normal")
SKLEARN = ("scikit-learn", "skl2onnx")


def _plain_booleans(make_attribute):
    """skl2onnx hands booleans to protobuf, which refuses them where integers are wanted."""

    def made(key, value, *more, **options):
        if isinstance(value, list | tuple | np.ndarray) and len(value) and isinstance(value[0], bool | np.bool_):
            value = [int(each) for each in value]
        return make_attribute(key, value, *more, **options)

    return made


onnx.helper.make_attribute = _plain_booleans(onnx.helper.make_attribute)


def estimator(name, make, target, options=None, inputs=None, **more):
    def write(path):
        fitted = make().fit(X) if target is None else make().fit(X, target)
        onnx.save(skl2onnx.to_onnx(fitted, X[:1], options=options, **more), path)

    files.add(f"sk_{name}", write, inputs or {"X": ROWS}, packages=SKLEARN)


def scaled(model):
    return make_pipeline(preprocessing.StandardScaler(), model)


logistic = linear_model.LogisticRegression
forest = ensemble.RandomForestClassifier
CLASSIFIERS = {
    "forest": lambda: forest(20, random_state=0),
    "extra_trees": lambda: ensemble.ExtraTreesClassifier(20, random_state=0),
    "tree": lambda: tree.DecisionTreeClassifier(max_depth=5),
    "gradient": lambda: ensemble.GradientBoostingClassifier(n_estimators=20, random_state=0),
    "hist_gradient": lambda: ensemble.HistGradientBoostingClassifier(max_iter=20, random_state=0),
    "adaboost": lambda: ensemble.AdaBoostClassifier(n_estimators=10, random_state=0),
    "bagging": lambda: ensemble.BaggingClassifier(n_estimators=5, random_state=0),
    "logistic": lambda: scaled(logistic()),
    "sgd": lambda: scaled(linear_model.SGDClassifier(loss="log_loss")),
    "svc": svm.SVC,
    "svc_probability": lambda: svm.SVC(probability=True),
    "nu_svc": lambda: svm.NuSVC(kernel="poly", nu=0.2),
    "linear_svc": svm.LinearSVC,
    "knn": lambda: neighbors.KNeighborsClassifier(5),
    "mlp": lambda: scaled(neural_network.MLPClassifier((32, 16), max_iter=30, activation="tanh")),
    "naive_bayes": naive_bayes.GaussianNB,
    "lda": discriminant_analysis.LinearDiscriminantAnalysis,
    "qda": discriminant_analysis.QuadraticDiscriminantAnalysis,
    "gaussian_process": gaussian_process.GaussianProcessClassifier,
    "calibrated": lambda: calibration.CalibratedClassifierCV(forest(10, random_state=0)),
    "voting": lambda: ensemble.VotingClassifier([("a", logistic()), ("b", forest(5))], voting="soft",
                                                flatten_transform=False),
    "stacking": lambda: ensemble.StackingClassifier([("a", logistic()), ("b", forest(5))]),
    "polynomial": lambda: make_pipeline(preprocessing.PolynomialFeatures(2), preprocessing.StandardScaler(), logistic()),
    "bins": lambda: make_pipeline(preprocessing.KBinsDiscretizer(5, encode="onehot-dense"), logistic()),
    "power": lambda: make_pipeline(preprocessing.PowerTransformer(), logistic()),
    "robust": lambda: make_pipeline(preprocessing.RobustScaler(), decomposition.PCA(4), logistic()),
    "knn_imputer": lambda: make_pipeline(impute.KNNImputer(n_neighbors=3), logistic()),
    "imputer": lambda: make_pipeline(impute.SimpleImputer(strategy="median", add_indicator=True), logistic()),
}  # fmt: skip
for name, make in CLASSIFIERS.items():
    estimator(
        name, make, TWO if name in ("gaussian_process", "stacking") else THREE, PLAIN if name != "linear_svc" else None
    )
estimator("forest_zipmap", CLASSIFIERS["forest"], THREE)
estimator("logistic_zipmap", CLASSIFIERS["logistic"], TWO)
estimator("logistic_words", CLASSIFIERS["logistic"], NAMES, PLAIN)
estimator("logistic_words_zipmap", CLASSIFIERS["logistic"], NAMES)
estimator("forest_words", CLASSIFIERS["forest"], NAMES, PLAIN)
estimator("svc_words", CLASSIFIERS["svc"], NAMES, PLAIN)
estimator("logistic_columns", CLASSIFIERS["logistic"], TWO, {"zipmap": "columns"})
REGRESSORS = {
    "forest_regressor": lambda: ensemble.RandomForestRegressor(20, random_state=0),
    "hist_gradient_regressor": lambda: ensemble.HistGradientBoostingRegressor(max_iter=20, random_state=0),
    "svr": svm.SVR,
    "ridge": lambda: scaled(make_pipeline(decomposition.PCA(3), linear_model.Ridge())),
    "knn_regressor": lambda: neighbors.KNeighborsRegressor(5),
    "gaussian_process_regressor": gaussian_process.GaussianProcessRegressor,
    "mlp_regressor": lambda: scaled(neural_network.MLPRegressor(hidden_layer_sizes=(32,), max_iter=30, random_state=0)),
    "huber": lambda: scaled(linear_model.HuberRegressor()),
}
for name, make in REGRESSORS.items():
    estimator(name, make, NUMBERS)
estimator("kmeans", lambda: cluster.KMeans(4, n_init=1, random_state=0), None)
estimator("mixture", lambda: mixture.GaussianMixture(3, random_state=0), None)
estimator("one_class", svm.OneClassSVM, None)
estimator(
    "isolation",
    lambda: ensemble.IsolationForest(n_estimators=20, random_state=0),
    None,
    target_opset={"": 18, "ai.onnx.ml": 3},
)
estimator("outliers", lambda: neighbors.LocalOutlierFactor(novelty=True), None)

TEXTS = [
    *("the cat sat on the mat", "dogs are great friends", "a cat and a dog", "stocks fell today"),
    "markets rose on news",
]
KINDS = np.array([0, 0, 0, 1, 1] * 20)


def text(name, *steps, shape=("B", 1)):
    def write(path):
        fitted = make_pipeline(*steps).fit(TEXTS * 20, KINDS)
        kind = StringTensorType([None, *shape[1:]])
        onnx.save(skl2onnx.to_onnx(fitted, initial_types=[("text", kind)], options=PLAIN), path)

    files.add(f"sk_{name}", write, {"text": words(*shape, choices=TEXTS)}, packages=SKLEARN)


vectorizer = feature_extraction.text.TfidfVectorizer
text("tfidf", vectorizer(), logistic())
text(
    "tfidf_pairs",
    vectorizer(ngram_range=(1, 2), sublinear_tf=True),
    linear_model.SGDClassifier(loss="log_loss"),
    shape=("B",),
)
text("counts", feature_extraction.text.CountVectorizer(lowercase=False), naive_bayes.MultinomialNB())


def columns(path):
    table = pd.DataFrame({"age": X[:, 0] * 10 + 40, "fare": X[:, 1] * 30 + 50})
    table["sex"], table["port"] = np.where(X[:, 2] > 0, "m", "f"), np.array(["S", "C", "Q"])[THREE]
    numbers = make_pipeline(impute.SimpleImputer(), preprocessing.StandardScaler())
    split = compose.ColumnTransformer(
        [("n", numbers, ["age", "fare"]), ("c", preprocessing.OneHotEncoder(handle_unknown="ignore"), ["sex", "port"])]
    )
    onnx.save(skl2onnx.to_onnx(make_pipeline(split, logistic()).fit(table, TWO), table[:1], options=PLAIN), path)


def mixed(path):
    table = pd.DataFrame(X, columns=[f"f{number}" for number in range(8)])
    scale = make_pipeline(impute.SimpleImputer(), preprocessing.MinMaxScaler())
    split = compose.ColumnTransformer(
        [("n", preprocessing.StandardScaler(), ["f0", "f1", "f2"]), ("q", scale, ["f3", "f4"])], remainder="passthrough"
    )
    model = make_pipeline(split, ensemble.HistGradientBoostingClassifier(max_iter=20, random_state=0))
    onnx.save(skl2onnx.to_onnx(model.fit(table, TWO), table[:1], options=PLAIN), path)


def ordinal(path):
    table = pd.DataFrame({"sex": np.where(X[:, 2] > 0, "m", "f"), "port": np.array(["S", "C", "Q"])[THREE]})
    model = make_pipeline(preprocessing.OrdinalEncoder(), tree.DecisionTreeClassifier())
    onnx.save(skl2onnx.to_onnx(model.fit(table, TWO), table[:1], options=PLAIN), path)


SEXES, PORTS = words("B", 1, choices=["m", "f"]), words("B", 1, choices=["S", "C", "Q"])
NUMBER = tensor("B", 1, draw="normal")
files.add("sk_columns", columns, {"age": NUMBER, "fare": NUMBER, "sex": SEXES, "port": PORTS}, packages=SKLEARN)
files.add("sk_columns_trees", mixed, {f"f{number}": NUMBER for number in range(8)}, packages=SKLEARN)
files.add("sk_ordinal", ordinal, {"sex": SEXES, "port": PORTS}, packages=SKLEARN)


def boosted(name, convert, package, make, target, opset=15, **options):
    def write(path):
        types = [("input", FloatTensorType([None, 8]))]
        fitted = make().fit(X, target)
        onnx.save(convert(fitted, initial_types=types, target_opset=opset, **options), path)

    files.add(name, write, {"input": ROWS}, packages=(package, "onnxmltools"))


def lgbm(kind, **options):
    import lightgbm

    return lambda: getattr(lightgbm, kind)(n_estimators=20, verbose=-1, **options)


def xgb(kind, **options):
    import xgboost

    return lambda: getattr(xgboost, kind)(n_estimators=20, **options)


light, extreme = (onnxmltools.convert_lightgbm, "lightgbm"), (onnxmltools.convert_xgboost, "xgboost-cpu")
boosted("lgbm_three", *light, lgbm("LGBMClassifier"), THREE, zipmap=False)
boosted("lgbm_two", *light, lgbm("LGBMClassifier"), TWO, zipmap=False)
boosted("lgbm_zipmap", *light, lgbm("LGBMClassifier"), THREE)
boosted("lgbm_regressor", *light, lgbm("LGBMRegressor"), NUMBERS)
boosted("lgbm_regressor_opset9", *light, lgbm("LGBMRegressor"), NUMBERS, opset=9)
boosted("lgbm_split", *light, lgbm("LGBMRegressor"), NUMBERS, split=10)
boosted("lgbm_dart", *light, lgbm("LGBMRegressor", boosting_type="dart"), NUMBERS)
boosted("lgbm_tweedie", *light, lgbm("LGBMRegressor", objective="tweedie"), abs(NUMBERS))
boosted("xgb_three", *extreme, xgb("XGBClassifier"), THREE)
boosted("xgb_two", *extreme, xgb("XGBClassifier"), TWO)
boosted("xgb_regressor", *extreme, xgb("XGBRegressor"), NUMBERS)
boosted("xgb_poisson", *extreme, xgb("XGBRegressor", objective="count:poisson"), abs(NUMBERS))
boosted("xgb_forest", *extreme, xgb("XGBRFRegressor"), NUMBERS)


def catboosted(kind, target, **options):
    def write(path):
        import catboost

        model = getattr(catboost, kind)(iterations=20, depth=4, verbose=0, allow_writing_files=False, **options)
        model.fit(X, target).save_model(str(path), format="onnx")

    return write


for name, kind, target, options in (
    ("cat_three", "CatBoostClassifier", THREE, {}),
    ("cat_two", "CatBoostClassifier", TWO, {}),
    ("cat_words", "CatBoostClassifier", NAMES, {}),
    ("cat_regressor", "CatBoostRegressor", NUMBERS, {}),
    ("cat_quantile", "CatBoostRegressor", NUMBERS, {"loss_function": "Quantile:alpha=0.9"}),
):
    files.add(name, catboosted(kind, target, **options), {"features": ROWS}, packages=("catboost",))
if __name__ == "__main__":
    files.main("sklearn", ["onnx"])
